# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Width of the loads and stores that make K, in PTX; no GPU needed."""

import re

import pytest

pytestmark = pytest.mark.codegen

ACCESS = r"\b(?:ld|st)\.(?:global|local)\S*"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_every_access_is_16_bytes_wide(other_kernels, dims_of_k, target):
    ptx = (other_kernels(target) / f"concat_mla_k-{dims_of_k}.ptx").read_text()
    assert f".target {target}" in ptx
    assert ".entry _concat_mla_k_kernel(" in ptx
    accesses = re.findall(ACCESS, ptx)
    assert set(accesses) == {"ld.global.v4.b32", "st.global.v4.b32"}

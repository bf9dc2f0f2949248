# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Order of stores, barriers and atomics in the PTX of both mask kernels; no GPU needed.

What goes wrong without them shows on a GPU alone, and not always there.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.codegen

CLEARING = r"st\.global\S*\s+\[.*\],\s*\{.*\}"
ZEROS = r"st\.global\.v4\.b32\s+\[.*\],\s*\{0, 0, 0, 0\}"
BARRIER = r"bar\.sync"
SETTING = r"atom\.global\S*\.or\.b32"


@pytest.fixture(params=["sm_90a", "sm_100a"])
def folder(request, other_kernels) -> Path:
    """PTX of each kernel for one target."""
    return other_kernels(request.param)


def test_tritons_kernel_clears_then_waits_then_sets(folder):
    ptx = (folder / "topk_mask-triton.ptx").read_text()
    pattern = f"({CLEARING})|({BARRIER})|({SETTING})"
    kinds = [match.lastindex for match in re.finditer(pattern, ptx)]
    assert kinds.count(2) == 1
    assert kinds == sorted(kinds) and set(kinds) == {1, 2, 3}


def test_the_cute_kernel_ends_with_clearing_the_rows_past_a_requests_length(
    folder,
):
    ptx = (folder / "topk_mask-vectorized.ptx").read_text()
    *_, end = re.split(BARRIER, ptx)
    assert re.search(ZEROS, end)
    # The others write what was put together in shared memory.
    assert len(re.findall(ZEROS, ptx)) == len(re.findall(ZEROS, end))

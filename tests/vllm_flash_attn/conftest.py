# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests of the FA4 patch run here on the FA4 that the overlay changes."""

import pytest

from vllm_sparse_mla import envs


@pytest.fixture(autouse=True)
def hopper_opt_in(request: pytest.FixtureRequest) -> None:
    """Skip what only the opt-in brings, in a process without it."""
    if request.path.stem == "test_vector_mask_mod" and not envs.sm90():
        pytest.skip("set VLLM_SPARSE_MLA_SM90=1 to change FA4's SM90 kernel")

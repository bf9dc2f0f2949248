# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures of this folder's tests."""

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_sparse_mla.testing.world import World


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device to put tensors on: the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def make_world(device: torch.device) -> Callable[..., World]:
    """Makes worlds on the device; skips where its FA4 takes no packed masks."""
    if device.type == "cuda":
        from vllm.model_executor.layers.attention import sparse_mla_attention as layer

        enabled = getattr(layer, "sm90_masked_mha_enabled", bool)
        if torch.cuda.get_device_capability()[0] != 10 and not enabled():
            pytest.skip("FA4 takes packed masks on SM100, or on SM90 with the opt-in")
    return functools.partial(World, device)


@pytest.fixture
def report():
    """Notes rows of results as JSON lines in the file that SPARSE_MLA_REPORT names."""

    def note(**row: Any) -> None:
        path = os.environ.get("SPARSE_MLA_REPORT")
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")

    return note

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures of this folder's tests."""

import functools
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_sparse_mla.testing.world import World

# What of FA4's mask module says that it takes packed masks.
_PACKED = SimpleNamespace(
    AttentionMask=SimpleNamespace(apply_mask_mod_sm90_vector=None)
)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device to put tensors on: the GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return torch.device("cpu")


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


@pytest.fixture
def on_device(monkeypatch):
    """Return a function that fakes the device's family, the opt-in and FA4's branch."""
    from vllm.model_executor.layers.attention import (
        sparse_mla_attention,
        sparse_mla_choice,
        sparse_mla_sm90,
    )

    def forget() -> None:
        sparse_mla_sm90._opted_in.cache_clear()
        sparse_mla_choice.prefill_estimate.cache_clear()

    def fake(
        family: int,
        switch: str | None = None,
        fa4_mask=_PACKED,
        gpu: tuple[str, int] = ("a GPU", 1),
    ) -> None:
        forget()
        monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.cute.mask", fa4_mask)
        platform = SimpleNamespace(
            is_device_capability_family=lambda f: f == family,
            get_device_name=lambda: gpu[0],
        )
        for module in (sparse_mla_attention, sparse_mla_choice, sparse_mla_sm90):
            monkeypatch.setattr(module, "current_platform", platform)
        monkeypatch.setattr(sparse_mla_choice, "num_compute_units", lambda: gpu[1])
        monkeypatch.setattr(sparse_mla_attention, "is_fa_version_supported", bool)
        # What vLLM's selector says: FA3 on SM90, FA4 on SM100.
        monkeypatch.setattr(
            sparse_mla_attention,
            "get_flash_attn_version",
            lambda **_: 4 if family == 100 else 3,
        )
        if switch is None:
            monkeypatch.delenv("VLLM_SPARSE_MLA_SM90", raising=False)
        else:
            monkeypatch.setenv("VLLM_SPARSE_MLA_SM90", switch)

    yield fake
    forget()

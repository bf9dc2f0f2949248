# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures of this folder's tests."""

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.platforms.interface import DeviceCapability
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
def one_pass(monkeypatch):
    """The opt-in is in force for contexts, and none is better taken in parts."""
    from vllm.model_executor.layers.attention import sparse_mla_context

    for name in ("sm90_masked_mha_enabled", "one_pass_is_faster"):
        monkeypatch.setattr(sparse_mla_context, name, lambda *_: True)


class _Platform(SimpleNamespace):
    """As much of a platform as dispatch reads."""

    def is_device_capability_family(self, family: int) -> bool:
        return self.capability is not None and self.capability[0] == family // 10

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return self.capability and DeviceCapability(*self.capability)

    def get_device_name(self) -> str:
        return self.gpu

    def is_cuda(self) -> bool:
        return self.capability is not None

    def is_rocm(self) -> bool:
        return self.name == "rocm"

    def is_xpu(self) -> bool:
        return False


@pytest.fixture
def on_device(monkeypatch):
    """Return a function that fakes the device, the opt-in and FA4's SM90 branch.

    Devices are ``sm90`` and the like, ``rocm`` and ``cpu``.
    """
    from vllm.model_executor.layers.attention import sparse_mla_attention as layer
    from vllm.v1.attention.backends import fa_utils

    modules, caches = [layer, fa_utils], []
    has_opt_in = hasattr(layer, "sm90_masked_mha_enabled")
    if has_opt_in:
        from vllm.model_executor.layers.attention import (
            sparse_mla_choice,
            sparse_mla_sm90,
        )

        modules += [sparse_mla_choice, sparse_mla_sm90]
        caches += [sparse_mla_sm90._opted_in, sparse_mla_choice.prefill_estimate]

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()

    def fake(
        name: str,
        switch: str | None = None,
        *,
        fa4: bool = True,
        fa4_mask=_PACKED,
        fa_version: int | None = None,
        gpu: tuple[str, int] = ("a GPU", 1),
    ) -> None:
        forget()
        monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.cute.mask", fa4_mask)
        found = re.fullmatch(r"sm(\d+)", name)
        platform = _Platform(
            name=name, capability=found and divmod(int(found[1]), 10), gpu=gpu[0]
        )
        for module in modules:
            monkeypatch.setattr(module, "current_platform", platform)
        if has_opt_in:
            for module in (sparse_mla_choice, sparse_mla_sm90):
                monkeypatch.setattr(module, "num_compute_units", lambda: gpu[1])
            monkeypatch.setattr(layer, "is_fa_version_supported", lambda version: fa4)
        # vLLM's choice: FA3 on SM90, FA4 on SM100, FA2 or none elsewhere.
        chosen = {"sm90": 3, "sm100": 4, "sm103": 4, "rocm": None, "cpu": None}
        version = fa_version or chosen.get(name, 2)
        monkeypatch.setattr(layer, "get_flash_attn_version", lambda **_: version)
        if switch is None:
            monkeypatch.delenv("VLLM_SPARSE_MLA_SM90", raising=False)
        else:
            monkeypatch.setenv("VLLM_SPARSE_MLA_SM90", switch)

    yield fake
    forget()

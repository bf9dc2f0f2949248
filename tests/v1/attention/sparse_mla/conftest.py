# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tests of this folder share.

Where there is no GPU, the reference stands in for FA4, the paged gather and the LSE
merge; the packed callbacks themselves run, on the host.
"""

import functools
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_sparse_mla.testing import reference


def _sibling(name: str) -> ModuleType:
    """Import a module beside this file, which need not be in a package."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


host_callbacks = _sibling("sparse_mla_host_callbacks")
world = _sibling("sparse_mla_world")


@dataclass(frozen=True)
class MaskedCall:
    """What the layer asked of FA4 in one call."""

    callback: str
    causal: bool
    return_lse: bool
    num_aux_tensors: int
    max_seqlen_q: int
    max_seqlen_k: int


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device to put tensors on: the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _skip_without_packed_masks() -> None:
    from vllm.model_executor.layers.attention import sparse_mla_attention as layer

    enabled = getattr(layer, "sm90_masked_mha_enabled", bool)
    if torch.cuda.get_device_capability()[0] != 10 and not enabled():
        pytest.skip("FA4 takes packed masks on SM100, or on SM90 with the opt-in")


def merge_attn_states(output: torch.Tensor, **kwargs: Any) -> None:
    """The reference's merge; like vLLM's kernel it takes no launch over no rows."""
    if output.shape[0] == 0:
        raise RuntimeError("invalid argument: a merge of no rows")
    reference.merge_attn_states(output=output, **kwargs)


@pytest.fixture
def masked_calls(monkeypatch: pytest.MonkeyPatch, device: torch.device):
    """The layer's FA4 calls, noted; and the stand-ins where there is no GPU."""
    import vllm.vllm_flash_attn as package
    from vllm import _custom_ops
    from vllm.model_executor.layers.attention import (
        mla_attention,
        sparse_mla_attention,
    )

    attend = host_callbacks.attend_on_host
    if device.type == "cuda":
        _skip_without_packed_masks()
        attend = package.flash_attn_varlen_func
    else:
        gather = reference.gather_and_maybe_dequant_cache
        monkeypatch.setattr(_custom_ops, "gather_and_maybe_dequant_cache", gather)
        for module in (mla_attention, sparse_mla_attention):
            monkeypatch.setattr(module, "merge_attn_states", merge_attn_states)
    calls: list[MaskedCall] = []

    def noted(**kwargs: Any) -> Any:
        calls.append(
            MaskedCall(
                reference.packed_mask_mod_name(kwargs["mask_mod"]),
                kwargs["causal"],
                kwargs["return_softmax_lse"],
                len(kwargs["aux_tensors"]),
                kwargs["max_seqlen_q"],
                kwargs["max_seqlen_k"],
            )
        )
        return attend(**kwargs)

    monkeypatch.setattr(package, "flash_attn_varlen_func", noted, raising=False)
    return calls


@pytest.fixture
def layer_dims() -> type:
    """The class of a layer's dimensions, where no world is needed."""
    return world.Dims


@pytest.fixture
def sparse_mla(masked_calls, device) -> SimpleNamespace:
    """Makes worlds; notes the FA4 calls of their layers in ``calls``."""
    return SimpleNamespace(
        world=functools.partial(world.World, device),
        dims=world.Dims,
        calls=masked_calls,
        columns_kept=host_callbacks.columns_kept,
    )


@pytest.fixture
def report():
    """Notes rows of results as JSON lines in the file that SPARSE_MLA_REPORT names."""

    def note(**row: Any) -> None:
        path = os.environ.get("SPARSE_MLA_REPORT")
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")

    return note

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Replaces what the device lacks by the reference, and notes each attention call."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm_sparse_mla.testing import kv_cache, reference

_ATTENTION = "vllm.model_executor.layers.attention"
_MERGE_USERS = (f"{_ATTENTION}.mla_attention", f"{_ATTENTION}.sparse_mla_attention")


@dataclass(frozen=True)
class MaskedCall:
    """What a layer asked of FA4 in one call; lengths in tokens."""

    callback: str
    causal: bool
    return_lse: bool
    num_aux_tensors: int
    max_seqlen_q: int
    num_splits: int


@contextmanager
def noted_attention(
    calls: list[MaskedCall],
    attend: Callable[..., Any] | None = None,
    cache_ops: bool = True,
) -> Iterator[None]:
    """Run a layer's outside calls on what this device has, and note those of attention.

    ``attend`` takes FA4's keyword arguments in its place; without it FA4 runs. Unless
    ``cache_ops`` run on vLLM's CUDA kernels, the gathers of the paged cache and the LSE
    merge are the reference's.
    """
    package = importlib.import_module("vllm.vllm_flash_attn")
    attend = attend or package.flash_attn_varlen_func

    def noted(**kwargs: Any) -> Any:
        calls.append(
            MaskedCall(
                reference.packed_mask_mod_name(kwargs.get("mask_mod")),
                kwargs["causal"],
                kwargs["return_softmax_lse"],
                len(kwargs.get("aux_tensors") or ()),
                kwargs["max_seqlen_q"],
                kwargs.get("num_splits", 0),
            )
        )
        return attend(**kwargs)

    with ExitStack() as stack:

        def replace(owner: str, name: str, new: Callable[..., Any]) -> None:
            module = importlib.import_module(owner)
            # Where FA4 cannot be imported, its package is an empty one.
            patch = mock.patch.object(module, name, new, create=module is package)
            stack.enter_context(patch)

        replace("vllm.vllm_flash_attn", "flash_attn_varlen_func", noted)
        if not cache_ops:
            for gather in kv_cache.GATHERS:
                replace("vllm._custom_ops", gather.__name__, gather)
            for user in _MERGE_USERS:
                replace(user, "merge_attn_states", reference.merge_attn_states)
        yield

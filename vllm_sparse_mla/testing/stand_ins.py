# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Replaces what the device lacks by the reference, and notes each attention call."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm_sparse_mla.testing import reference

_ATTENTION = "vllm.model_executor.layers.attention"
_MERGE_USERS = (f"{_ATTENTION}.mla_attention", f"{_ATTENTION}.sparse_mla_attention")


@contextmanager
def attention_calls(fa4: bool, cache_ops: bool) -> Iterator[list[str]]:
    """Run the layer's outside calls on what this device has.

    Args:
        fa4: attention runs on the real FA4, else on the reference.
        cache_ops: the paged-cache gather and the LSE merge run on vLLM's CUDA
            kernels, else on the reference.

    Yields:
        The callback's name of each attention call, filled while the context lasts.
    """
    package = importlib.import_module("vllm.vllm_flash_attn")
    attend: Callable[..., Any] = (
        package.flash_attn_varlen_func if fa4 else reference.flash_attn_varlen_func
    )
    calls: list[str] = []

    def noted(**kwargs: Any) -> Any:
        calls.append(reference.packed_mask_mod_name(kwargs.get("mask_mod")))
        return attend(**kwargs)

    replaced = [(package, "flash_attn_varlen_func", noted)]
    if not cache_ops:
        custom_ops = importlib.import_module("vllm._custom_ops")
        gather = reference.gather_and_maybe_dequant_cache
        replaced.append((custom_ops, gather.__name__, gather))
        merge = reference.merge_attn_states
        replaced += [
            (importlib.import_module(user), merge.__name__, merge)
            for user in _MERGE_USERS
        ]
    patches = [
        mock.patch.object(owner, name, new, create=owner is package)
        for owner, name, new in replaced
    ]
    for patch in patches:
        patch.start()
    try:
        yield calls
    finally:
        for patch in reversed(patches):
            patch.stop()

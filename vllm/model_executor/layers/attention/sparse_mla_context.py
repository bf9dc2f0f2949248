# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The walk over a step's cached context, which its layers share."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        SparseMLACommonMetadata,
    )

T = TypeVar("T", bound="SparseMLACommonMetadata")


def context_walk(attn_metadata: T) -> T:
    """A step's metadata for dense MHA's walk over the chunks of its context.

    Made by the first layer that asks; the step's own metadata keeps it for the others.
    Its prefills have no backend: each layer sets its own.

    Args:
        attn_metadata: the step's, some of whose prefills have a context.

    Returns:
        The same but for the chunks. A request without query tokens has nothing to
        attend or merge with, and the kernels refuse to be launched over no rows: chunks
        without query tokens are left out, and one whose first request continues without
        any is no continuation.
    """
    walk = getattr(attn_metadata, "_masked_mha_walk", None)
    if walk is not None:
        return walk
    prefill = attn_metadata.prefill
    assert prefill is not None
    context = prefill.chunked_context
    assert context is not None
    chunks = [
        replace(chunk, is_continuation=False)
        if chunk.continuation_token_end == chunk.token_slice.start
        else chunk
        for chunk in context.chunks
        if chunk.token_slice.start < chunk.token_slice.stop
    ]
    context = replace(context, chunks=chunks)
    prefill = replace(prefill, chunked_context=context, prefill_backend=None)
    walk = replace(attn_metadata, prefill=prefill)
    attn_metadata._masked_mha_walk = walk  # type: ignore[attr-defined]
    return walk

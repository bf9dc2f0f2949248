# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The walks over a step's cached tokens, which its layers share."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonPrefillMetadata,
    build_mla_chunked_context_metadata,
)
from vllm.model_executor.layers.attention.sparse_mla_sm90 import (
    one_pass_is_faster,
    sm90_masked_mha_enabled,
)

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
    walk = _with_context(attn_metadata, context)
    attn_metadata._masked_mha_walk = walk  # type: ignore[attr-defined]
    return walk


def takes_one_pass(prefill: MLACommonPrefillMetadata, num_heads: int) -> bool:
    """Whether FA4 may take contexts and new tokens of a step in one call.

    The new tokens are in an unquantized cache as they come, so that whole sequences can
    be gathered from it: one projection and one call, and nothing to merge. Not measured
    on SM100: False there. The step's metadata keeps the answer.

    Args:
        prefill: the step's.
        num_heads: of the rank.
    """
    known = getattr(prefill, "_masked_mha_one_pass", None)
    if known is None:
        known = sm90_masked_mha_enabled() and _fits_one_pass(prefill, num_heads)
        prefill._masked_mha_one_pass = known  # type: ignore[attr-defined]
    return known


def _fits_one_pass(prefill: MLACommonPrefillMetadata, num_heads: int) -> bool:
    context = prefill.chunked_context
    if context is None:
        return False
    assert prefill.query_lens_cpu is not None
    query_lens = prefill.query_lens_cpu.tolist()
    context_lens = context.context_lens_list
    if sum(query_lens) + sum(context_lens) > context.workspace.shape[0]:
        return False
    return one_pass_is_faster(query_lens, context_lens, num_heads)


def whole_sequences(attn_metadata: T) -> T:
    """A step's metadata for a walk over its whole sequences, in one chunk.

    Made by the first layer that asks; the step's own metadata keeps it for the others.

    Args:
        attn_metadata: the step's, of which `takes_one_pass` is true.
    """
    walk = getattr(attn_metadata, "_masked_mha_whole", None)
    if walk is not None:
        return walk
    prefill = attn_metadata.prefill
    assert prefill is not None and prefill.query_lens_cpu is not None
    context = prefill.chunked_context
    assert context is not None
    query_lens = prefill.query_lens_cpu
    ends = torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0)))
    context = build_mla_chunked_context_metadata(
        context_lens_cpu=query_lens + torch.tensor(context.context_lens_list),
        prefill_query_start_loc_cpu=ends,
        chunked_prefill_workspace=context.workspace,
        chunked_prefill_workspace_size=context.workspace.shape[0],
        # Nothing is split, so that nothing has to be aligned.
        block_size=1,
        align_chunk_to_block=False,
        device=prefill.query_start_loc.device,
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
    )
    assert context is not None and len(context.chunks) == 1
    walk = _with_context(attn_metadata, context)
    attn_metadata._masked_mha_whole = walk  # type: ignore[attr-defined]
    return walk


def _with_context(
    attn_metadata: T, context: MLACommonPrefillMetadata.ChunkedContextMetadata
) -> T:
    """The same with other chunks, and no backend yet."""
    prefill = attn_metadata.prefill
    assert prefill is not None
    prefill = replace(prefill, chunked_context=context, prefill_backend=None)
    return replace(attn_metadata, prefill=prefill)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The query of dense and masked MHA, without a copy where it lies whole."""

import torch


def mha_query(q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
    """The tensor whose columns the parts are, or else a copy.

    Args:
        q_nope: ``[tokens, heads, qk_nope_head_dim]``.
        q_pe: ``[tokens, heads, qk_rope_head_dim]``, rotated.

    Returns:
        ``[tokens, heads, qk_head_dim]``, contiguous; a copy unless the parts lie side
        by side, as they do where RoPE has been applied in place.
    """
    tokens, heads, nope_dim = q_nope.shape
    head_dim = nope_dim + q_pe.shape[2]
    strides = (heads * head_dim, head_dim, 1)
    # Parts that are captured in a CUDA graph have storages of their own.
    storages = [part.untyped_storage().data_ptr() for part in (q_nope, q_pe)]
    if (
        storages[0] == storages[1]
        and q_nope.stride() == q_pe.stride() == strides
        and q_pe.storage_offset() == q_nope.storage_offset() + nope_dim
    ):
        return q_nope.as_strided((tokens, heads, head_dim), strides)
    return torch.cat((q_nope, q_pe), dim=-1)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A sparse-MLA layer outside a model, for the check and the benchmarks."""

from typing import Any

import torch


def make_masked_layer(
    cls: type,
    *,
    num_heads: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    kv_b_weight: torch.Tensor,
    topk_indices_buffer: torch.Tensor,
    kv_cache_dtype: str = "auto",
) -> Any:
    """Make a layer as vLLM does on one rank, with masked MHA forced on.

    vLLM's configuration has to be set (``set_current_vllm_config``).

    Args:
        cls: a sparse-MLA implementation class.
        num_heads: heads of the rank; the other dimensions are the model's.
        kv_b_weight: ``[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]``.
        topk_indices_buffer: int32 ``[tokens, topk]``, read at each call.
        kv_cache_dtype: as vLLM spells what the backend has made of it.
    """
    qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
    layer = cls(
        num_heads=num_heads,
        head_size=kv_lora_rank + qk_rope_head_dim,
        scale=qk_head_dim**-0.5,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=None,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        qk_head_dim=qk_head_dim,
        v_head_dim=v_head_dim,
        # As vLLM's linear layers, it returns the product and no bias.
        kv_b_proj=lambda x: (torch.nn.functional.linear(x, kv_b_weight), None),
        topk_indices_buffer=topk_indices_buffer,
    )
    # Whoever calls it decides what to run, whatever the device and the head count.
    layer.masked_mha_available = True
    layer._sparse_mla_force_masked_mha = True
    return layer

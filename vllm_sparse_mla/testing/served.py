# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""As much of a served model's configuration as start-up asks of its layers."""

from types import SimpleNamespace

import torch

from vllm_sparse_mla.testing.layer import MODELS

CONTEXT_ROWS = 64 * 1024  # of the context workspace: vLLM's upper bound


def server_config(
    model: str = "deepseek",
    *,
    num_layers: int = 1,
    topk: int = 2048,
    backend: str = "FLASHMLA_SPARSE",
    tensor_parallel_size: int = 8,
    dcp_world_size: int = 1,
    force_mqa: bool = False,
    max_num_seqs: int = 1024,
    max_num_batched_tokens: int = 16384,
    max_model_len: int = 163840,
    enforce_eager: bool = False,
    enable_jit_warmup: bool = True,
) -> SimpleNamespace:
    """Make a configuration whose forward context holds vLLM's layers.

    The layers are vLLM's ``MLAAttention`` over a ``SparseMLACommonImpl``, with the
    attributes that dispatch reads; masked MHA is available to each.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        SparseMLACommonImpl,
    )

    dims = MODELS[model]
    head_dims = dict(
        qk_nope_head_dim=dims.qk_nope_head_dim,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        v_head_dim=dims.v_head_dim,
    )
    text_config = SimpleNamespace(
        index_topk=topk, kv_lora_rank=dims.kv_lora_rank, **head_dims
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text_config,
            dtype=torch.bfloat16,
            max_model_len=max_model_len,
            enforce_eager=enforce_eager,
            get_num_attention_heads=(
                lambda parallel: dims.num_heads // parallel.tensor_parallel_size
            ),
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel_size),
        attention_config=SimpleNamespace(sparse_mla_force_mqa=force_mqa),
        kernel_config=SimpleNamespace(enable_jit_warmup=enable_jit_warmup),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    for index in range(num_layers):
        impl = SparseMLACommonImpl.__new__(SparseMLACommonImpl)
        impl.scale = dims.qk_head_dim**-0.5
        impl.dcp_world_size = dcp_world_size
        impl.kv_cache_dtype = "auto"
        impl.num_heads = dims.num_heads // tensor_parallel_size
        impl.qk_head_dim = dims.qk_head_dim
        impl.v_head_dim = dims.v_head_dim
        impl.masked_mha_available = True
        impl._use_flashinfer_concat_mla_k = False
        layer = MLAAttention.__new__(MLAAttention)
        vars(layer).update(
            impl=impl,
            attn_backend=SimpleNamespace(get_name=lambda: backend),
            prefill_backend=object(),
            hisparse_cache=None,
            **head_dims,
            _vllm_config=config,
        )
        config.compilation_config.static_forward_context[f"layers.{index}"] = layer
    return config


def layers_of(config: SimpleNamespace) -> list:
    return list(config.compilation_config.static_forward_context.values())


def step_metadata(
    query_lens: list[int],
    context_lens: list[int],
    topk: int = 2048,
    mask_words: int | None = 1 << 40,
) -> SimpleNamespace:
    """As much of a step's metadata as dispatch reads; None is no mask workspace."""
    context = workspace = None
    if any(context_lens):
        context = SimpleNamespace(
            chunks=[SimpleNamespace(max_seq_len=1)],
            context_lens_list=context_lens,
            workspace=torch.empty(CONTEXT_ROWS, 1, device="meta"),
        )
    if mask_words is not None:
        workspace = torch.empty(mask_words, dtype=torch.int32, device="meta")
    prefill = SimpleNamespace(
        max_query_len=max(query_lens),
        query_lens_cpu=torch.tensor(query_lens),
        chunked_context=context,
        use_dense_mha=False,
        topk_mask_workspace=workspace,
    )
    longest = max(map(sum, zip(query_lens, context_lens)))
    return SimpleNamespace(
        prefill=prefill, prefill_max_seq_len=longest, topk_tokens=topk
    )


def takes_masked_mha(layer, query_lens: list[int], seq_len: int) -> bool:
    """Ask vLLM's dispatch about a batch of sequences of ``seq_len`` keys."""
    from vllm.model_executor.layers.attention import sparse_mla_attention

    return layer._use_sparse_mha(
        step_metadata(
            query_lens,
            [seq_len - query_len for query_len in query_lens],
            layer._vllm_config.model_config.hf_text_config.index_topk,
            sparse_mla_attention.GLOBAL_TOPK_MASK_MAX_BYTES // 4,
        )
    )

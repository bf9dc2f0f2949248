# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start-up compilation of what the first long prompt would otherwise compile.

FA4 compiles a kernel for each combination of callback, causality and LSE (3 to 6 s
each), and others for very short queries; the mask builder one for each of its
specialisations. Both register with vLLM's JIT warm-up registry while the model is
loaded, only where masked MHA is available.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.attention.mla_attention import get_mla_dims
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Any batch up to FA4's batch-lookup threshold and any number of keys compile to the
# same kernel.
_NUM_REQUESTS = 2
_KEY_LEN = 4096
_TILE_LEN = 128
# Longest queries of one row tile and of two have kernels of their own in FA4; any
# longer ones share theirs.
_QUERY_TILES = (1, 2, 3)


@dataclass(frozen=True)
class MaskedCall:
    """One way in which ``SparseMLACommonImpl`` calls FA4."""

    offset: bool
    causal: bool
    return_lse: bool


MASKED_CALLS = (
    # Pure prefill.
    MaskedCall(offset=False, causal=True, return_lse=False),
    # Suffix and context chunks of one whole-sequence mask.
    MaskedCall(offset=True, causal=True, return_lse=True),
    MaskedCall(offset=True, causal=False, return_lse=True),
    # Suffix and context chunks with a mask for each range.
    MaskedCall(offset=False, causal=True, return_lse=True),
    MaskedCall(offset=False, causal=False, return_lse=True),
)


def reachable_query_tiles(index_topk: int) -> list[int]:
    """Row tiles of the longest query with which a batch can take masked MHA.

    A batch without context takes it only with more than ``index_topk`` tokens, and
    every threshold asks for 512 or more query tokens beside a context.
    """
    *short, long = _QUERY_TILES
    return [*(n for n in short if n * _TILE_LEN > index_topk), long]


class FA4MaskedMHAKernel(VllmJitKernel["FA4MaskedMHAKernel.CompileKey"]):
    """Compiles FA4's masked kernels without launching them."""

    @dataclass(frozen=True)
    class CompileKey:
        call: MaskedCall
        num_heads: int
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        v_head_dim: int
        dtype: torch.dtype
        query_tiles: int

    def get_warmup_keys(self, vllm_config: "VllmConfig") -> list[CompileKey]:
        dims = get_mla_dims(vllm_config.model_config)
        return [
            self.CompileKey(
                call=call,
                num_heads=vllm_config.model_config.get_num_attention_heads(
                    vllm_config.parallel_config
                ),
                qk_nope_head_dim=dims.qk_nope_head_dim,
                qk_rope_head_dim=dims.qk_rope_head_dim,
                v_head_dim=dims.v_head_dim,
                dtype=vllm_config.model_config.dtype,
                query_tiles=query_tiles,
            )
            for call in MASKED_CALLS
            for query_tiles in reachable_query_tiles(
                vllm_config.model_config.hf_text_config.index_topk
            )
        ]

    def compile(self, compile_key: CompileKey) -> None:
        from vllm.model_executor.layers.attention.sparse_mla_mask import mask_mod_for
        from vllm.vllm_flash_attn.cute.interface import (
            _flash_attn_fwd,
            _make_compile_only_tensor_spec,
        )

        call = compile_key.call
        heads, v_dim = compile_key.num_heads, compile_key.v_head_dim
        qk_dim = compile_key.qk_nope_head_dim + compile_key.qk_rope_head_dim
        # V is the tail of the joint K/V projection, a strided view.
        kv_dim = compile_key.qk_nope_head_dim + v_dim
        query_len = compile_key.query_tiles * _TILE_LEN
        tokens_q, tokens_k = _NUM_REQUESTS * query_len, _NUM_REQUESTS * _KEY_LEN

        def spec(shape, dtype=compile_key.dtype, align=16, stride=None):
            return _make_compile_only_tensor_spec(shape, dtype, align, stride)

        # FA4 takes aux tensors at their natural alignment.
        aux_tensors = [spec((_NUM_REQUESTS, query_len, 4), torch.int32, None)]
        if call.offset:
            aux_tensors.append(spec((_NUM_REQUESTS,), torch.int32, None))
        _flash_attn_fwd(
            q=spec((tokens_q, heads, qk_dim)),
            k=spec((tokens_k, heads, qk_dim)),
            v=spec((tokens_k, heads, v_dim), stride=(heads * kv_dim, kv_dim, 1)),
            cu_seqlens_q=spec((_NUM_REQUESTS + 1,), torch.int32, 4),
            cu_seqlens_k=spec((_NUM_REQUESTS + 1,), torch.int32, 4),
            max_seqlen_q=query_len,
            max_seqlen_k=_KEY_LEN,
            softmax_scale=qk_dim**-0.5,
            causal=call.causal,
            num_splits=1,
            return_lse=call.return_lse,
            out=spec((tokens_q, heads, v_dim)),
            lse=(
                spec((heads, tokens_q), torch.float32, 4, stride=(None, 1))
                if call.return_lse
                else None
            ),
            mask_mod=mask_mod_for(call.offset),
            aux_tensors=aux_tensors,
            aux_tensor_leading_dims=[2, 0][: len(aux_tensors)],
            compile_only=True,
        )


FA4_MASKED_MHA_KERNEL = FA4MaskedMHAKernel()


def register_masked_mha_warmup() -> None:
    """Register FA4's masked kernels and the mask builder with the active registry."""
    from vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl import (
        TOPK_MASK_KERNEL,
    )

    FA4_MASKED_MHA_KERNEL.register_warmup()
    TOPK_MASK_KERNEL.register_warmup()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""K of every head in one pass: its own part, and the RoPE part that heads share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.model_executor.layers.attention.mla_attention import get_mla_dims
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    LaunchSpec,
    TritonWarmupTensor,
    VllmTritonJitKernel,
)
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Rows of K, one for a token and head, that a program writes.
_ROWS = 128


class ConcatMLAKKernel(VllmTritonJitKernel["ConcatMLAKKernel.CompileKey"]):
    """Owner of the compiled programs: one for a model's dimensions."""

    @dataclass(frozen=True)
    class CompileKey:
        num_heads: int
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        v_head_dim: int
        dtype: torch.dtype

    # Named, or profilers would show it as "kernel".
    @staticmethod
    @triton.jit(do_not_specialize=["num_rows"], repr=lambda _: "_concat_mla_k_kernel")
    def kernel(
        k_ptr,
        k_nope_ptr,
        k_pe_ptr,
        num_rows,
        k_nope_stride0,
        k_nope_stride1,
        k_pe_stride0,
        NUM_HEADS: tl.constexpr,
        NOPE_DIM: tl.constexpr,
        ROPE_DIM: tl.constexpr,
        COLS: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        """One program writes ``COLS`` columns of ``ROWS`` rows.

        Programs of the same rows follow one another, so that they are written together.
        """
        HEAD_DIM: tl.constexpr = NOPE_DIM + ROPE_DIM
        block = tl.program_id(0) // (HEAD_DIM // COLS)
        first_col = tl.program_id(0) % (HEAD_DIM // COLS) * COLS
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        token, head = row // NUM_HEADS, row % NUM_HEADS
        if first_col < NOPE_DIM:
            source = k_nope_ptr + token * k_nope_stride0 + head * k_nope_stride1
            source += first_col
        else:
            source = k_pe_ptr + token * k_pe_stride0 + (first_col - NOPE_DIM)
        target = k_ptr + row * HEAD_DIM + first_col
        cols = tl.arange(0, COLS)[None, :]
        mask = (row < num_rows)[:, None]
        values = tl.load(source[:, None] + cols, mask=mask)
        tl.store(target[:, None] + cols, values, mask=mask)

    def get_warmup_keys(self, vllm_config: "VllmConfig") -> list[CompileKey]:
        """The model's own key; none if its K has no RoPE part."""
        dims = get_mla_dims(vllm_config.model_config)
        if not dims.qk_rope_head_dim:
            return []
        return [
            self.CompileKey(
                vllm_config.model_config.get_num_attention_heads(
                    vllm_config.parallel_config
                ),
                dims.qk_nope_head_dim,
                dims.qk_rope_head_dim,
                dims.v_head_dim,
                vllm_config.model_config.dtype,
            )
        ]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        key = compile_key
        kv_dim = key.qk_nope_head_dim + key.v_head_dim
        heads, rope_dim = key.num_heads, key.qk_rope_head_dim

        def tensor(*shape: int, strides: tuple[int, ...] | None = None):
            return TritonWarmupTensor(key.dtype, shape=shape, strides=strides)

        return dict(
            k=tensor(1, heads, key.qk_nope_head_dim + rope_dim),
            k_nope=tensor(
                *(1, heads, key.qk_nope_head_dim),
                strides=(heads * kv_dim, kv_dim, 1),
            ),
            k_pe=tensor(1, 1, rope_dim),
        )

    @kernel_launcher
    def __call__(
        self, k: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor
    ) -> LaunchSpec:
        """Fill ``k``; arguments as ``concat_mla_k`` has made and checked them."""
        tokens, heads, nope_dim = k_nope.shape
        rope_dim = k_pe.shape[2]
        # The largest power of two that divides both parts.
        cols = min(nope_dim & -nope_dim, rope_dim & -rope_dim)
        blocks = cdiv(tokens * heads, _ROWS) * (k.shape[2] // cols)
        return (blocks,), dict(
            num_rows=tokens * heads,
            NUM_HEADS=heads,
            NOPE_DIM=nope_dim,
            ROPE_DIM=rope_dim,
            COLS=cols,
            ROWS=_ROWS,
        )


CONCAT_MLA_K_KERNEL = ConcatMLAKKernel()


def can_concat_mla_k(k_nope: torch.Tensor, k_pe: torch.Tensor) -> bool:
    """Whether ``concat_mla_k`` takes them: 16-bit, and K has a RoPE part."""
    return (
        k_nope.dtype == k_pe.dtype
        and k_nope.dtype.itemsize == 2
        and k_nope.ndim == k_pe.ndim == 3
        and k_pe.shape[:2] == (k_nope.shape[0], 1)
        and k_pe.shape[2] > 0
        and k_nope.stride(2) == k_pe.stride(2) == 1
    )


def concat_mla_k(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Concatenate the parts of K, reading and writing each entry once.

    Args:
        k_nope: ``[tokens, heads, qk_nope_head_dim]``, 16-bit; any strides but the last,
            as in the joint projection of K and V.
        k_pe: ``[tokens, 1, qk_rope_head_dim]``, of the same type; any row stride.

    Returns:
        ``[tokens, heads, qk_nope_head_dim + qk_rope_head_dim]``, contiguous.

    Raises:
        ValueError: Other shapes, types or strides, before any launch.
    """
    if not can_concat_mla_k(k_nope, k_pe):
        raise ValueError(
            "k_nope and k_pe must be of one 16-bit type, [tokens, heads, dim] and "
            "[tokens, 1, dim > 0], with last stride 1; got "
            + " and ".join(
                f"{part.dtype} {tuple(part.shape)} of strides {part.stride()}"
                for part in (k_nope, k_pe)
            )
        )
    tokens, heads, nope_dim = k_nope.shape
    k = k_nope.new_empty(tokens, heads, nope_dim + k_pe.shape[2])
    if k.numel() > 0:
        CONCAT_MLA_K_KERNEL(k, k_nope, k_pe)
    return k

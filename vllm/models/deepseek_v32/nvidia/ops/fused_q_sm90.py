# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``fused_q``'s CuTe DSL kernel for SM90: fewer and larger blocks.

What bounds ``FusedQKernel`` on an H200 is not memory but the start of its blocks: for
8192 tokens and 128 heads there are 294,912 of them, of 128 threads, which move 4 bytes
a thread of a BF16 query.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Uint32

from vllm.cute_utils import cvt
from vllm.platforms import current_platform

MAX_WARPS = 8


def for_this_device(stock: Any) -> Any:
    """The class of the kernel: ``FusedQKernel``, or on SM90 what derives from it.

    Args:
        stock: ``FusedQKernel``.
    """
    if current_platform.has_device_capability(100):
        return stock

    class FusedQKernelSM90(stock):
        # Profilers would show the function too.
        __qualname__ = "FusedQKernelSM90"
        one_head_a_warp = stock.mqa

        def __init__(
            self,
            rope_dim: int,
            nope_dim: int,
            num_heads: int,
            idx_dim: int,
            num_idx_heads: int,
            index_rope_interleave: bool,
        ) -> None:
            super().__init__(
                rope_dim,
                nope_dim,
                num_heads,
                idx_dim,
                num_idx_heads,
                index_rope_interleave,
            )
            # FP8 queries have 512 more elements a head: there the bytes decide. With
            # few heads the indexer's blocks would become small.
            wide = nope_dim == 0 and num_heads % 16 == 0
            self.heads_a_warp = 4 if wide else 1
            self.num_warps = math.gcd(
                MAX_WARPS, num_heads // self.heads_a_warp, num_idx_heads // 4
            )
            self.num_ctas_per_tok = num_heads // (self.heads_a_warp * self.num_warps)
            self.num_ctas_per_idx_tok = num_idx_heads // (4 * self.num_warps)

        @cute.jit
        def mqa(
            self,
            positions: cute.Tensor,
            q_pe: cute.Tensor,
            q_pe_rope_cache: cute.Tensor,
            ql_nope: cute.Tensor,
            q_scale: cute.Tensor,
            mqa_output: cute.Tensor,
            token_id,
            group_id,
        ):
            if cutlass.const_expr(self.heads_a_warp == 4):
                rotate_heads(
                    q_pe, q_pe_rope_cache, mqa_output, positions, token_id, group_id
                )
            else:
                self.one_head_a_warp(
                    positions,
                    q_pe,
                    q_pe_rope_cache,
                    ql_nope,
                    q_scale,
                    mqa_output,
                    token_id,
                    group_id,
                )

    return FusedQKernelSM90


@cute.jit
def rotate_heads(
    q_pe: cute.Tensor,
    rope_cache: cute.Tensor,
    output: cute.Tensor,
    positions: cute.Tensor,
    token_id,
    group_id,
):
    """RoPE of one group of heads: eight threads a head, 16 bytes a thread.

    Args:
        q_pe: BF16 ``[tokens, heads, 64]``, pairs side by side.
        rope_cache: ``[positions, 64]`` of BF16 or FP32: 32 cosines, then 32 sines.
        output: BF16 ``[tokens, heads, 64]``.
        positions: int64 ``[tokens]``.
        token_id: which token.
        group_id: which group; it has as many heads as a block has eighths of a thread.
    """
    tid, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    head_id = group_id * (threads // 8) + tid // 8
    lane = tid % 8
    cute.arch.griddepcontrol_wait()

    op = cute.nvgpu.CopyUniversalOp()
    copy_16_bytes = cute.make_copy_atom(op, Uint32, num_bits_per_copy=128)
    copy_8_bytes = cute.make_copy_atom(op, Uint32, num_bits_per_copy=64)
    pairs = cute.make_rmem_tensor(8, BFloat16)
    source = cute.local_tile(q_pe[token_id, head_id, None], (8,), (lane,))
    cute.copy(copy_16_bytes, source, pairs)
    angles = cute.zipped_divide(rope_cache[positions[token_id], None], (4,))
    cos = cute.make_rmem_tensor(4, rope_cache.element_type)
    sin = cute.make_rmem_tensor(4, rope_cache.element_type)
    if cutlass.const_expr(rope_cache.element_type == BFloat16):
        cute.copy(copy_8_bytes, angles[None, lane], cos)
        cute.copy(copy_8_bytes, angles[None, 8 + lane], sin)
        cos = cvt.bf16x2_to_fp32x2(cos)
        sin = cvt.bf16x2_to_fp32x2(sin)
    else:
        cute.copy(copy_16_bytes, angles[None, lane], cos)
        cute.copy(copy_16_bytes, angles[None, 8 + lane], sin)

    values = cvt.bf16x2_to_fp32x2(pairs)
    rotated = cute.make_rmem_tensor(8, BFloat16)
    words = cute.recast_tensor(rotated, Uint32)
    for i in cutlass.range_constexpr(4):
        even, odd = values[2 * i], values[2 * i + 1]
        words[i] = cvt.fp32x2_to_bf16x2(
            even * cos[i] - odd * sin[i], odd * cos[i] + even * sin[i]
        )
    cute.arch.griddepcontrol_launch_dependents()
    target = cute.local_tile(output[token_id, head_id, None], (8,), (lane,))
    cute.copy(copy_16_bytes, rotated, target)

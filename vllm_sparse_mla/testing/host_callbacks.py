# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Packed callbacks run on the host: CuTe compiles them for the CPU.

So a callback's own arithmetic decides which keys a layer attends to, with no GPU.
"""

import functools
import operator
from typing import Any
from unittest import mock

import torch

from vllm_sparse_mla.testing import reference


def callback_call(mask_mod: Any) -> Any:
    """A CuTe function that calls a packed callback as FA4 does.

    It takes batch, row, first column and aux tensors, and returns the words of
    ``__vec_size__`` columns.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32

    from vllm.vllm_flash_attn.cute import utils

    lanes = (mask_mod.__vec_size__,)

    @cute.jit
    def call(b: Int32, row: Int32, first: Int32, aux_tensors: list):
        columns = cute.make_rmem_tensor(lanes[0], Int32)
        for j in cutlass.range_constexpr(lanes[0]):
            columns[j] = first + j
        return mask_mod(
            utils.scalar_to_ssa(b, Int32).broadcast_to(lanes),
            utils.scalar_to_ssa(Int32(0), Int32).broadcast_to(lanes),
            utils.scalar_to_ssa(row, Int32).broadcast_to(lanes),
            columns.load(),
            None,
            aux_tensors,
        )

    return call


@functools.cache
def _host_callback(mask_mod: Any, num_aux_tensors: int) -> Any:
    """Compile a packed callback for the host: all its answers, row by row."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32, Uint32

    from vllm.vllm_flash_attn.cute import utils

    call, lanes = callback_call(mask_mod), mask_mod.__vec_size__
    step = lanes // 32

    @cute.jit
    def run(mask: cute.Tensor, key_starts: cute.Tensor | None, out: cute.Tensor):
        aux_tensors = [mask]
        if cutlass.const_expr(key_starts is not None):
            aux_tensors = [mask, key_starts]
        for b in range(out.shape[0]):
            for row in range(out.shape[1]):
                for group in range(out.shape[2] // step):
                    kept = cute.make_rmem_tensor(step, dtype=Uint32)
                    kept.store(call(b, row, group * lanes, aux_tensors))
                    for i in cutlass.range_constexpr(step):
                        out[b, row, group * step + i] = Int32(kept[i])

    def example(ndim: int) -> Any:
        return to_cute(torch.empty((2, 2, 8)[:ndim], dtype=torch.int32))

    starts = example(1) if num_aux_tensors > 1 else None
    # Offset callbacks shift by inline PTX: none on a host.
    with (
        mock.patch.object(utils, "shr_u32", operator.rshift),
        mock.patch.object(cute.arch, "shf", funnel_shift),
    ):
        return cute.compile(run, example(3), starts, example(3))


def funnel_shift(low: Any, high: Any, bits: Any, kind: str) -> Any:
    """PTX's ``shf.r.wrap`` in plain arithmetic; `bits` is below 32."""
    from cutlass import Uint32, Uint64

    assert kind == "r"
    return Uint32(((Uint64(high) << 32) | Uint64(low)) >> Uint64(bits))


def to_cute(tensor: torch.Tensor) -> Any:
    from cutlass.cute.runtime import from_dlpack

    return from_dlpack(tensor, assumed_align=4).mark_layout_dynamic(tensor.ndim - 1)


def columns_kept(
    mask_mod: Any, aux_tensors: list[torch.Tensor], rows: int, num_columns: int
) -> torch.Tensor:
    """What a callback answers for columns ``[0, num_columns)``, run on the host.

    A packed mask of the columns, int32 ``[batch, rows, words]``.
    """
    mask, key_starts = [*aux_tensors, None][:2]
    words = 4 * -(-num_columns // 128)
    out = mask.new_zeros(mask.shape[0], rows, words)
    if out.numel():
        run = _host_callback(mask_mod, len(aux_tensors))
        starts = None if key_starts is None else to_cute(key_starts)
        run(to_cute(mask), starts, to_cute(out))
    return out


def attend_on_host(**kwargs: Any) -> Any:
    """FA4 on the host: its callback decides, the reference attends.

    As in FA4's SM90 kernel, no diagonal is applied beside the callback.
    """
    kept = columns_kept(
        kwargs["mask_mod"],
        kwargs["aux_tensors"],
        kwargs["max_seqlen_q"],
        kwargs["max_seqlen_k"],
    )

    def dense_mask_mod() -> None:
        """Stand for "the mask of the columns themselves"."""

    plain = dict(
        mask_mod=dense_mask_mod,
        aux_tensors=[kept],
        aux_tensor_leading_dims=[2],
        causal=False,
        num_splits=1,
    )
    return reference.flash_attn_varlen_func(**kwargs | plain)

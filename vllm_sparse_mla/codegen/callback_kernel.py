# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A kernel that runs a packed mask callback alone and writes the words it returns.

It calls the callback as FA4 does: for one row and ``__vec_size__`` consecutive
columns, with the index vectors and aux tensors (natural alignment, dynamic strides)
that FA4 would pass. Needs CUTLASS and ``vllm.vllm_flash_attn.cute``.
"""

from collections.abc import Callable
from functools import cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32, const_expr
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm.vllm_flash_attn.cute.cute_dsl_utils import to_cute_aux_tensor
from vllm_sparse_mla.testing.host_callbacks import callback_call

GROUP = 128
_WORDS = GROUP // 32
_ROWS_PER_BLOCK = 128


def callback_words(
    mask_mod: Callable,
    mask: torch.Tensor,
    num_groups: int,
    key_starts: torch.Tensor | None = None,
    column_step: int = GROUP,
) -> torch.Tensor:
    """Call ``mask_mod`` on a GPU for every request, row and group of 128 columns.

    Args:
        mask_mod: callback whose ``__vec_size__`` is 32, 64 or 128.
        mask: int32 [batch, rows, words] on a CUDA device, the first aux tensor.
        num_groups: groups of 128 columns.
        key_starts: int32 [batch], the second aux tensor if given.
        column_step: group ``g`` begins at column ``g * column_step``.

    Returns:
        int32 [batch, rows, num_groups, 4]; bit ``j`` of word ``i`` of a group is the
        callback's answer for column ``first + 32 * i + j``.

    Raises:
        ValueError: if ``mask`` is not on a CUDA device.
    """
    if not mask.is_cuda:
        raise ValueError(f"mask must be on a CUDA device, got {mask.device}")
    words = mask.new_empty((*mask.shape[:2], num_groups, _WORDS))
    kernel = compile_callback_kernel(mask_mod, key_starts is not None)
    kernel(mask, key_starts, words, column_step)
    return words


@cache
def compile_callback_kernel(mask_mod: Callable | None, with_key_starts: bool):
    """Compile the kernel for one callback, for the DSL's target.

    Args:
        mask_mod: callback, or None for a kernel that writes constant words.
        with_key_starts: whether there is a second aux tensor.

    Returns:
        A function of ``(mask, key_starts, words, column_step)``.

    Raises:
        ValueError: if the callback is not packed.
    """
    vec_size = getattr(mask_mod, "__vec_size__", 1)
    if mask_mod is not None and vec_size not in (32, 64, GROUP):
        raise ValueError(
            f"mask_mod must have a __vec_size__ of 32, 64 or {GROUP}, got {vec_size}"
        )
    # The DSL takes only types and alignment from these.
    with FakeTensorMode():
        mask = torch.empty((2, 2, 8), dtype=torch.int32, device="cuda")
        words = torch.empty((2, 2, 2, _WORDS), dtype=torch.int32, device="cuda")
        key_starts = torch.empty(2, dtype=torch.int32, device="cuda")
        return cute.compile(
            _CallbackAlone(mask_mod),
            to_cute_aux_tensor(mask, 2),
            to_cute_aux_tensor(key_starts, 0) if with_key_starts else None,
            to_cute_aux_tensor(words, 3),
            Int32(GROUP),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )


class _CallbackAlone:
    """One thread a row, one block 128 rows of one group."""

    def __init__(self, mask_mod: Callable | None) -> None:
        self.words = None if mask_mod is None else callback_call(mask_mod)
        self.vec_size = getattr(mask_mod, "__vec_size__", GROUP)

    @cute.jit
    def __call__(
        self,
        mask: cute.Tensor,
        key_starts: cute.Tensor | None,
        words: cute.Tensor,
        column_step: Int32,
        stream: cuda.CUstream,
    ):
        batch, rows, groups, _ = words.shape
        self.kernel(mask, key_starts, words, column_step).launch(
            grid=[cute.ceil_div(rows, _ROWS_PER_BLOCK), groups, batch],
            block=[_ROWS_PER_BLOCK, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mask: cute.Tensor,
        key_starts: cute.Tensor | None,
        words: cute.Tensor,
        column_step: Int32,
    ):
        block, group, batch = cute.arch.block_idx()
        row = block * _ROWS_PER_BLOCK + cute.arch.thread_idx()[0]
        aux_tensors = [mask]
        if const_expr(key_starts is not None):
            aux_tensors = [mask, key_starts]
        if row < words.shape[1]:
            for call in cutlass.range_constexpr(GROUP // self.vec_size):
                first = group * column_step + call * self.vec_size
                kept = cute.make_rmem_tensor(self.vec_size // 32, Uint32)
                if const_expr(self.words is None):
                    kept.fill(Uint32(first))
                else:
                    kept.store(self.words(batch, row, first, aux_tensors))
                for i in cutlass.range_constexpr(self.vec_size // 32):
                    word = call * (self.vec_size // 32) + i
                    words[batch, row, group, word] = Int32(kept[i])

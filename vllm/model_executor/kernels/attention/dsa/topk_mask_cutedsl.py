# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CuTe DSL kernel that turns top-k rows into a bit-packed attention mask.

One block owns a piece of up to ``TILE_WORDS`` words of a mask row. It assembles the
bitmap in shared memory with atomic ORs and writes each word of the row once, 16 bytes
at a time, so the row is defined whatever the output held before:

    topk row (int32, gmem) -> registers -> bitmap (smem) -> mask row (gmem)

A block walks the rows ``blockIdx.x, blockIdx.x + gridDim.x, ...`` of request
``blockIdx.y``, and the indices of its next row are in flight while it works on the
present one. ``blockIdx.z`` numbers the pieces of a row too wide for shared memory.

A key index ``k`` of row ``q`` becomes bit ``p = k - range_start`` iff
``0 <= p < max_seq_len`` and ``k <= context_len + q``; without ranges ``range_start`` is
0, without a context ``context_len``. Every length, start and stride is a runtime value.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32

from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_cutedsl_helper import (
    CuTeDSLLaunchSpec,
    VllmCuTeDSLJitKernel,
)

VECTOR_WORDS = 4  # int32 values in one 16-byte access
SPARE_WORDS = 32
MAX_GRID_YZ = 65535


# The kernel's shape, the same for every call. A block's threads read 2048 indices at
# once, by so many 16-byte loads of each in flight; so many blocks are to be resident on
# a multiprocessor, which caps the registers, and each has a piece of a mask row in
# shared memory (16 KiB).
THREADS = 128
VECTORS = 4
BLOCKS_PER_SM = 8
TILE_WORDS = 4096


def plan_grid(
    batch_size: int, max_q_len: int, num_words: int, num_sms: int
) -> tuple[int, int, int]:
    """Choose a grid that fills the GPU once, and gives small inputs a block per row.

    Returns:
        ``(row blocks per request, requests, pieces per row)``.

    Raises:
        ValueError: more requests or pieces than a grid has room for.
    """
    pieces = -(-num_words // TILE_WORDS)
    for name, count in (("batch_size", batch_size), ("pieces per row", pieces)):
        if count > MAX_GRID_YZ:
            raise ValueError(f"{name} must be at most {MAX_GRID_YZ}, got {count}.")
    slots = num_sms * BLOCKS_PER_SM
    rows_per_block = max(1, -(-batch_size * max_q_len * pieces // slots))
    return -(-max_q_len // rows_per_block), batch_size, pieces


def rows_are_vectorizable(topk: torch.Tensor) -> bool:
    """Whether each row of `topk` starts on a 16-byte boundary."""
    return topk.data_ptr() % 16 == 0 and topk.stride(0) % VECTOR_WORDS == 0


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cute.jit
def _bit(position: Uint32):
    return Uint32(1) << (position & Uint32(31))


@cute.jit
def _vector_at(row: cute.Pointer, vector: Int32):
    """The 16 bytes numbered `vector` of a row that starts on such a boundary."""
    pointer = cute.make_ptr(
        row.dtype,
        (row + vector * VECTOR_WORDS).toint(),
        cute.AddressSpace.gmem,
        assumed_align=16,
    )
    return cute.make_tensor(pointer, cute.make_layout(VECTOR_WORDS))


class _TopkMaskProgram:
    """The device program of one compile key."""

    def __init__(self, vectorized: bool) -> None:
        self.vectorized = vectorized

    @cute.jit
    def __call__(
        self,
        topk: cute.Tensor,
        cu_q_lens: cute.Tensor,
        out: cute.Tensor,
        context_lens: cute.Tensor,
        range_starts: cute.Tensor,
        has_context: Int32,
        has_ranges: Int32,
        max_q_len: Int32,
        max_seq_len: Int32,
        row_blocks: Int32,
        batch_size: Int32,
        pieces: Int32,
        stream: CUstream,
    ):
        self.kernel(
            topk,
            cu_q_lens,
            out,
            context_lens,
            range_starts,
            has_context,
            has_ranges,
            max_q_len,
            max_seq_len,
        ).launch(
            grid=(row_blocks, batch_size, pieces),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.jit
    def load_indices(
        self,
        row: cute.Pointer,
        chunk: Int32,
        num_topk: Int32,
        tid: Int32,
        indices: cute.Tensor,
    ):
        """Read this thread's indices of one chunk; -1 past the end.

        Vectorized, columns past the last whole vector are left to `scatter_tail`.
        """
        step = THREADS * VECTORS
        indices.fill(-1)
        if cutlass.const_expr(self.vectorized):
            num_vectors = num_topk // VECTOR_WORDS
            for j in cutlass.range_constexpr(VECTORS):
                vector = chunk * step + j * THREADS + tid
                if vector < num_vectors:
                    cute.autovec_copy(_vector_at(row, vector), indices[None, j])
        else:
            for j in cutlass.range_constexpr(VECTORS):
                for e in cutlass.range_constexpr(VECTOR_WORDS):
                    column = (
                        chunk * step * VECTOR_WORDS
                        + (j * VECTOR_WORDS + e) * THREADS
                        + tid
                    )
                    if column < num_topk:
                        indices[e, j] = row[column]

    @cute.jit
    def position_of(self, index: Int32, base: Uint32, limit: Uint32):
        """Bit position of a key in the piece, and whether it belongs there.

        A negative index does not: ``base + limit`` is at most 2**31.
        """
        position = Uint32(index) - base
        return position, position < limit

    @cute.jit
    def or_word(self, bitmap: cute.Pointer, word: Uint32, bits: Uint32):
        cute.arch.red(
            bitmap + Int32(word), bits, op="or", dtype="b32", sem="relaxed", scope="cta"
        )

    @cute.jit
    def scatter(
        self,
        indices: cute.Tensor,
        base: Uint32,
        limit: Uint32,
        bitmap: cute.Pointer,
        spare: Uint32,
    ):
        """OR the bits of this thread's indices into the bitmap.

        Rows are often runs of consecutive keys. Eight neighbouring threads would then
        queue for one word four times, so 4 indices of one word become one atomic. In
        other rows a dropped index sets a bit of this lane's `spare` word, which costs
        less than a branch.
        """
        for j in cutlass.range_constexpr(VECTORS):
            first, _ = self.position_of(indices[0, j], base, limit)
            differing = Uint32(0)
            for e in cutlass.range_constexpr(1, VECTOR_WORDS):
                position, _ = self.position_of(indices[e, j], base, limit)
                differing = differing | (first ^ position)
            if differing < Uint32(32):
                bits = Uint32(0)
                for e in cutlass.range_constexpr(VECTOR_WORDS):
                    position, inside = self.position_of(indices[e, j], base, limit)
                    bits = bits | (_bit(position) if inside else Uint32(0))
                if bits != Uint32(0):
                    self.or_word(bitmap, first >> Uint32(5), bits)
            else:
                for e in cutlass.range_constexpr(VECTOR_WORDS):
                    position, inside = self.position_of(indices[e, j], base, limit)
                    position = position if inside else spare
                    self.or_word(bitmap, position >> Uint32(5), _bit(position))

    @cute.jit
    def scatter_tail(
        self,
        row: cute.Pointer,
        num_topk: Int32,
        tid: Int32,
        base: Uint32,
        limit: Uint32,
        bitmap: cute.Pointer,
    ):
        """Scatter the up to 3 indices past the last whole vector."""
        column = num_topk // VECTOR_WORDS * VECTOR_WORDS + tid
        if column < num_topk:
            position, inside = self.position_of(row[column], base, limit)
            if inside:
                self.or_word(bitmap, position >> Uint32(5), _bit(position))

    @cute.kernel
    def kernel(
        self,
        topk: cute.Tensor,
        cu_q_lens: cute.Tensor,
        out: cute.Tensor,
        context_lens: cute.Tensor,
        range_starts: cute.Tensor,
        has_context: Int32,
        has_ranges: Int32,
        max_q_len: Int32,
        max_seq_len: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        first_row, request, piece = cute.arch.block_idx()
        row_step, _, _ = cute.arch.grid_dim()
        num_topk = topk.shape[1]
        num_words = out.shape[2]

        bitmap = cutlass.utils.SmemAllocator().allocate_tensor(
            Int32,
            cute.make_layout(
                (VECTOR_WORDS, (TILE_WORDS + SPARE_WORDS) // VECTOR_WORDS)
            ),
            byte_alignment=16,
        )
        # Words past the tile take the bits of dropped indices: one for each lane, so
        # that they do not queue for one bank.
        spare = Uint32(32) * Uint32(TILE_WORDS + tid % SPARE_WORDS)

        # Rows [0, num_rows) of the request have a top-k row, the rest are all zero.
        q_start = Int32(cu_q_lens[request])
        q_end = cutlass.min(Int32(cu_q_lens[request + 1]), Int32(topk.shape[0]))
        num_rows = cutlass.min(q_end - q_start, max_q_len)

        context_len = Int32(0)
        if has_context != 0:
            context_len = Int32(context_lens[request])
        range_start = Int32(0)
        if has_ranges != 0:
            range_start = Int32(range_starts[request])

        # The piece holds the bits of keys [base, base + limit), where limit grows with
        # the row, as one more key is not later than its query, up to `most`.
        first_word = piece * TILE_WORDS
        piece_words = cutlass.min(num_words - first_word, Int32(TILE_WORDS))
        num_vectors = piece_words // VECTOR_WORDS
        first_key = Int64(range_start) + Int64(first_word) * 32
        base = Uint32(range_start) + Uint32(first_word) * Uint32(32)
        most = cutlass.min(
            Int64(max_seq_len) - Int64(first_word) * 32, Int64(piece_words) * 32
        )
        most = cutlass.min(most, Int64(1 << 31) - first_key)
        visible = Int64(context_len) + 1 - first_key

        topk_rows = topk.iterator + Int64(q_start) * Int64(topk.stride[0])
        out_rows = (
            out.iterator + Int64(request) * Int64(out.stride[0]) + Int64(first_word)
        )
        topk_step = Int64(topk.stride[0])
        out_step = Int64(out.stride[1])

        present = cute.make_rmem_tensor((VECTOR_WORDS, VECTORS), Int32)
        coming = cute.make_rmem_tensor((VECTOR_WORDS, VECTORS), Int32)
        words = cute.make_rmem_tensor((VECTOR_WORDS,), Int32)
        zeros = cute.make_rmem_tensor((VECTOR_WORDS,), Int32)
        zeros.fill(0)

        coming.fill(-1)
        if first_row < num_rows:
            self.load_indices(
                topk_rows + Int64(first_row) * topk_step, 0, num_topk, tid, coming
            )
        for v in cutlass.range(tid, num_vectors, THREADS, unroll=2):
            cute.autovec_copy(zeros, bitmap[None, v])
        cute.arch.sync_threads()

        num_chunks = cute.ceil_div(num_topk, THREADS * VECTORS * VECTOR_WORDS)
        for row in range(first_row, num_rows, row_step):
            topk_row = topk_rows + Int64(row) * topk_step
            cute.autovec_copy(coming, present)
            if row + row_step < num_rows:
                self.load_indices(
                    topk_rows + Int64(row + row_step) * topk_step,
                    0,
                    num_topk,
                    tid,
                    coming,
                )
            limit = cutlass.min(most, visible + Int64(row))
            limit = Uint32(cutlass.max(limit, Int64(0)))
            self.scatter(present, base, limit, bitmap.iterator, spare)
            for chunk in range(1, num_chunks):
                self.load_indices(topk_row, chunk, num_topk, tid, present)
                self.scatter(present, base, limit, bitmap.iterator, spare)
            if cutlass.const_expr(self.vectorized):
                self.scatter_tail(topk_row, num_topk, tid, base, limit, bitmap.iterator)
            cute.arch.sync_threads()

            out_row = out_rows + Int64(row) * out_step
            for v in cutlass.range(tid, num_vectors, THREADS, unroll=2):
                cute.autovec_copy(bitmap[None, v], words)
                cute.autovec_copy(zeros, bitmap[None, v])
                cute.autovec_copy(words, _vector_at(out_row, v))
            cute.arch.sync_threads()

        # The first of this block's rows past the request's length.
        past = first_row
        if first_row < num_rows:
            past = first_row + cute.ceil_div(num_rows - first_row, row_step) * row_step
        for row in range(past, max_q_len, row_step):
            out_row = out_rows + Int64(row) * out_step
            for v in cutlass.range(tid, num_vectors, THREADS, unroll=2):
                cute.autovec_copy(zeros, _vector_at(out_row, v))


class TopkMaskKernel(VllmCuTeDSLJitKernel["TopkMaskKernel.CompileKey"]):
    """Owner of the compiled programs: at most 2, one per `CompileKey`."""

    @dataclass(frozen=True)
    class CompileKey:
        vectorized: bool

    def kernel(self, compile_key: CompileKey) -> Any:
        return _TopkMaskProgram(compile_key.vectorized)

    def get_warmup_keys(self, vllm_config: Any) -> list[CompileKey]:
        """The key that the layer asks for, none without a top-k."""
        topk = getattr(vllm_config.model_config.hf_text_config, "index_topk", None)
        # The layer passes rows of the contiguous top-k buffer.
        return [self.CompileKey(topk % VECTOR_WORDS == 0)] if topk else []

    def warmup_inputs(self, compile_key: CompileKey) -> tuple[Any, ...]:
        def vector() -> Any:
            return cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,))

        topk = cute.runtime.make_fake_tensor(
            Int32,
            (cute.sym_int(), cute.sym_int()),
            stride=(cute.sym_int64(), 1),
            assumed_align=16 if compile_key.vectorized else 4,
        )
        out = cute.runtime.make_fake_tensor(
            Int32,
            (cute.sym_int(), cute.sym_int(), cute.sym_int()),
            stride=(cute.sym_int64(), cute.sym_int64(), 1),
            assumed_align=16,
        )
        flags_lengths_grid = (Int32(1) for _ in range(2 + 2 + 3))
        return topk, vector(), out, vector(), vector(), *flags_lengths_grid

    @kernel_launcher
    def __call__(
        self,
        topk: torch.Tensor,
        cu_q_lens: torch.Tensor,
        max_q_len: int,
        max_seq_len: int,
        out: torch.Tensor,
        context_lens: torch.Tensor | None = None,
        range_starts: torch.Tensor | None = None,
    ) -> CuTeDSLLaunchSpec[CompileKey]:
        """Build masks; arguments as `build_packed_topk_mask` has checked them.

        Raises:
            ValueError: more than 65535 requests, or pieces of a row.
        """
        grid = plan_grid(
            cu_q_lens.shape[0] - 1,
            max_q_len,
            out.shape[2],
            _num_sms(out.device),
        )
        return self.CompileKey(rows_are_vectorizable(topk)), (
            topk,
            cu_q_lens,
            out,
            # Any vector stands for one that is not there, and is not read.
            cu_q_lens if context_lens is None else context_lens,
            cu_q_lens if range_starts is None else range_starts,
            int(context_lens is not None),
            int(range_starts is not None),
            max_q_len,
            max_seq_len,
            *grid,
        )


TOPK_MASK_KERNEL = TopkMaskKernel()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Program: FA4's masking of SM90 tiles with a packed callback, run on the host.

Each thread of each row tile masks its accumulators of each key block, in FA4's order,
by the overlaid ``AttentionMask.apply_mask``; CuTe compiles it for the CPU, the layout
of FA4's own tiled matrix product included. Mask storage lies between two pages that may
not be touched: to stray out of it ends the process.

Prints a line of JSON for each case: its name, and whether exactly the mask's keys, and
no key past a request's last, kept their score.
"""

import ctypes
import json
import math
import mmap
from dataclasses import dataclass
from unittest import mock

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Uint32, Uint64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

from vllm_sparse_mla.plugin import register
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module
from vllm_sparse_mla.testing.host_callbacks import (
    columns_kept,
    funnel_shift,
    to_cute,
)

register()
install_parent_module()

from quack import layout_utils  # noqa: E402

from vllm.model_executor.layers.attention import sparse_mla_mask  # noqa: E402
from vllm.vllm_flash_attn.cute import utils  # noqa: E402
from vllm.vllm_flash_attn.cute.mask import (  # noqa: E402
    AttentionMask,
    packed_mask_front,
)
from vllm.vllm_flash_attn.cute.seqlen_info import SeqlenInfoQK  # noqa: E402
from vllm.vllm_flash_attn.cute.utils import AuxData  # noqa: E402

TILE_M = 128
ROWS = 2 * TILE_M
THREADS = 128 * (TILE_M // 64)  # one warpgroup for 64 rows
UNVISITED = 7.0


@dataclass(frozen=True)
class Case:
    """Requests of ``k_lens`` keys that begin at key ``starts[b]`` of the mask."""

    callback: str
    tile_n: int
    words: int
    k_lens: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    reserved_word: bool = False


# A row of 8 words holds 256 keys, one of 16 holds 512, 480 beside a reserved word. The
# last row of the storage is a full one, beside the forbidden page.
CASES = {
    "dense-128": Case("dense", 128, 8, (256, 1, 0, 129, 128)),
    "dense-80": Case("dense", 80, 8, (80, 0, 81, 1, 160, 256)),
    "offset-128": Case("offset_dense", 128, 16, (300, 475, 0, 1), (37, 37, 64, 511)),
    "offset-80": Case("offset_dense", 80, 16, (300, 475, 0, 80), (96, 37, 64, 1)),
    "reserved-word-128": Case(
        "offset_dense", 128, 16, (300, 443, 0, 1), (37, 37, 64, 479), True
    ),
    "reserved-word-80": Case(
        "offset_dense", 80, 16, (300, 443, 0, 80), (96, 37, 64, 1), True
    ),
}


def between_forbidden_pages(shape: tuple[int, ...]) -> torch.Tensor:
    """Int32 storage that fills whole pages, with a protected page on each side."""
    size, page = 4 * math.prod(shape), mmap.PAGESIZE
    assert size % page == 0
    area = mmap.mmap(-1, size + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for forbidden in (address, address + page + size):
        no_access = 0
        assert libc.mprotect(ctypes.c_void_p(forbidden), page, no_access) == 0
    count = math.prod(shape)
    return torch.frombuffer(area, dtype=torch.int32, count=count, offset=page).view(
        shape
    )


def compile_masking(case: Case):
    """Compile what all threads of all tiles do: ``run(mask, starts, k_lens, out)``."""
    tile_n = case.tile_n
    front = packed_mask_front(getattr(sparse_mla_mask, f"{case.callback}_mask_mod"))

    @cute.jit
    def mask_block(mask, thr_mma, aux, b, m_block, n_block, first, out):
        coordinates = layout_utils.reshape_acc_to_mn(
            thr_mma.partition_C(cute.make_identity_tensor((TILE_M, tile_n)))
        )
        acc = cute.make_rmem_tensor(
            thr_mma.partition_shape_C((TILE_M, tile_n)), Float32
        )
        acc.fill(1.0)
        mask.apply_mask(
            acc,
            b,
            Int32(0),
            m_block,
            n_block,
            thr_mma,
            mask_seqlen=first,
            mask_causal=True,
            mask_mod=front,
            aux_data=AuxData(aux, None),
        )
        scores = layout_utils.reshape_acc_to_mn(acc)
        if n_block >= 0:
            for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
                for c in cutlass.range_constexpr(cute.size(scores.shape[1])):
                    row, column = coordinates[r, c]
                    row, column = m_block * TILE_M + row, n_block * tile_n + column
                    out[b, row, column] = scores[r, c]

    @cute.jit
    def run(
        mask: cute.Tensor,
        starts: cute.Tensor | None,
        k_lens: cute.Tensor,
        out: cute.Tensor,
    ):
        aux = [mask]
        if cutlass.const_expr(starts is not None):
            aux = [mask, starts]
        # As FA4's SM90 kernel makes it.
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(TILE_M // 64, 1, 1),
            tiler_mn=(64, tile_n),
        )
        for b in range(out.shape[0]):
            for m_block in range(ROWS // TILE_M):
                for thread in range(THREADS):
                    thr_mma = tiled_mma.get_slice(thread)
                    info = SeqlenInfoQK.create(
                        b, Int32(ROWS), Int32(0), mSeqUsedK=k_lens
                    )
                    tile = AttentionMask(TILE_M, tile_n, info)
                    last = cute.ceil_div(k_lens[b], tile_n) - 1
                    mask_block(tile, thr_mma, aux, b, m_block, last, True, out)
                    for i in range(last):
                        n_block = last - 1 - i
                        mask_block(tile, thr_mma, aux, b, m_block, n_block, False, out)

    def example(ndim: int, dtype: torch.dtype = torch.int32):
        return to_cute(torch.empty((2, 2, 8)[:ndim], dtype=dtype))

    starts = example(1) if case.starts and not case.reserved_word else None
    # Inline PTX, of which a host has none.
    with (
        mock.patch.object(utils, "shr_u32", shift_right),
        mock.patch.object(cute.arch, "shf", funnel_shift),
    ):
        return cute.compile(
            run, example(3), starts, example(1), example(3, torch.float)
        )


def shift_right(value: Uint32, shift: Uint32) -> Uint32:
    """PTX's ``shr.u32``, which gives 0 for shifts past 31."""
    return Uint32(Uint64(value) >> Uint64(cutlass.min(Int32(shift), Int32(32))))


def is_exact(case: Case) -> bool:
    """Run a case on a random mask, and its callback alone on the same storage."""
    generator = torch.Generator().manual_seed(0)
    mask = between_forbidden_pages((len(case.k_lens), ROWS, case.words))
    mask.random_(-(2**31), 2**31, generator=generator)
    starts = case.starts or (0,) * len(case.k_lens)
    aux = [mask]
    if case.reserved_word:
        mask[:, 0, -1] = torch.tensor(starts, dtype=torch.int32)
    elif case.starts:
        aux.append(torch.tensor(starts, dtype=torch.int32))
    bits = ((mask[..., None] >> torch.arange(32)) & 1).bool().flatten(2)
    columns = case.tile_n * -(-max(case.k_lens) // case.tile_n)
    expected = torch.full((len(case.k_lens), ROWS, columns), UNVISITED)
    for b, (start, k_len) in enumerate(zip(starts, case.k_lens)):
        visited = case.tile_n * -(-k_len // case.tile_n)
        expected[b, :, :visited] = -math.inf
        keep = bits[b, :, start : start + k_len]
        expected[b, :, :k_len].masked_fill_(keep, 1.0)

    out = torch.full_like(expected, UNVISITED)
    key_starts = to_cute(aux[1]) if len(aux) > 1 else None
    k_lens = to_cute(torch.tensor(case.k_lens, dtype=torch.int32))
    compile_masking(case)(to_cute(mask), key_starts, k_lens, to_cute(out))

    # SM100 calls the callback itself, for every group of columns with a key.
    callback = getattr(sparse_mla_mask, f"{case.callback}_mask_mod")
    kept = columns_kept(callback, aux, ROWS, max(case.k_lens))
    kept_bits = ((kept[..., None] >> torch.arange(32)) & 1).bool().flatten(2)
    alone = all(
        torch.equal(kept_bits[b, :, :k_len], bits[b, :, start : start + k_len])
        for b, (start, k_len) in enumerate(zip(starts, case.k_lens))
    )
    return torch.equal(out, expected) and alone


if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps({"case": name, "exact": is_exact(case)}), flush=True)

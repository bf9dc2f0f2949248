# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Program: FA4's masking of SM90 tiles with a vectorised callback, run on the host.

Each thread of each row tile masks its accumulators of each key block, in FA4's order,
by ``AttentionMask.apply_mask``; CuTe compiles it for the CPU, the layout of FA4's own
tiled matrix product included. Mask storage lies between two pages that may not be
touched: to stray out of it ends the process.

``--fa4-dir`` names a folder whose ``flash_attn``, which has to have the patch, takes
the place of the overlay's ``AttentionMask``. Other arguments are the cases; without any
it is all of them.

Prints a line of JSON for each case: its name, and whether exactly the mask's keys, and
no key past a request's last, kept their score.
"""

import argparse
import ctypes
import functools
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

from vllm_sparse_mla.codegen.worker import use_fa4_from
from vllm_sparse_mla.plugin import register
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module
from vllm_sparse_mla.testing.host_callbacks import (
    columns_kept,
    funnel_shift,
    to_cute,
)

parser = argparse.ArgumentParser()
parser.add_argument("--fa4-dir")
parser.add_argument("cases", nargs="*")
parser.add_argument("--without", nargs="*", default=[])
ARGUMENTS = parser.parse_args()

register()
install_parent_module()
if ARGUMENTS.fa4_dir:
    use_fa4_from(ARGUMENTS.fa4_dir)

from quack import layout_utils  # noqa: E402

from vllm.model_executor.layers.attention import sparse_mla_mask  # noqa: E402
from vllm.vllm_flash_attn.cute import utils  # noqa: E402
from vllm.vllm_flash_attn.cute.mask import AttentionMask  # noqa: E402
from vllm.vllm_flash_attn.cute.seqlen_info import SeqlenInfoQK  # noqa: E402
from vllm.vllm_flash_attn.cute.utils import AuxData  # noqa: E402

TILE_M = 128
ROWS = 2 * TILE_M
THREADS = 128 * (TILE_M // 64)  # one warpgroup for 64 rows
UNVISITED = 7.0


@dataclass(frozen=True)
class Case:
    """Requests of ``k_lens`` keys that begin at key ``starts[b]`` of the mask.

    ``callback`` is the name of one of vLLM's, or the ``__vec_size__`` of one that keeps
    the mask's words in even heads and their complement in odd ones. With ``heads``
    above 1 (PackGQA) a tile's rows are ``heads`` for each query.
    """

    callback: str | int
    tile_n: int
    words: int
    k_lens: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    reserved_word: bool = False
    num_queries: int = ROWS
    heads: int = 1
    causal: bool = False
    ahead: bool = True


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
    "dense-causal-128": Case("dense", 128, 8, (256, 1, 0, 129, 128, 255), causal=True),
    "offset-causal-80": Case(
        "offset_dense", 80, 16, (300, 475, 0, 80), (96, 37, 64, 1), causal=True
    ),
    "dense-at-use-80": Case("dense", 80, 8, (80, 0, 81, 1, 160, 256), ahead=False),
    # The last query is that of the storage's last row, in the middle of a tile.
    "few-queries-128": Case("dense", 128, 8, (256, 77), num_queries=192),
    "two-heads-80": Case(32, 80, 8, (256, 81, 0, 80), num_queries=128, heads=2),
    "two-heads-causal-128": Case(
        128, 128, 8, (256, 81, 128, 1), num_queries=128, heads=2, causal=True
    ),
    **{
        f"vec-{vec}-{tile_n}": Case(vec, tile_n, 8, (256, 81, 0, 1))
        for vec in (2, 8, 32, 64, 256)
        for tile_n in (80, 128)
    },
}


@functools.cache
def words_mask_mod(vec_size: int):
    """A callback of ``vec_size`` keys, which it may ask for at multiples of that."""

    @cute.jit
    def mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        flip = Uint32(0) - Uint32(head[0] & 1)
        keep = cute.make_rmem_tensor(max(vec_size // 32, 1), Uint32)
        for i in cutlass.range_constexpr(max(vec_size // 32, 1)):
            word = Uint32(aux_tensors[0][batch[0], q_idx[0], (kv_idx[0] >> 5) + i])
            keep[i] = (word ^ flip) >> Uint32(kv_idx[0] & 31)
        if cutlass.const_expr(vec_size < 32):
            # Bits past a call's keys mean nothing.
            keep[0] = keep[0] ^ Uint32(0xFFFFFFFF & ~((1 << vec_size) - 1))
        return keep.load()

    mask_mod.__vec_size__ = vec_size
    return mask_mod


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
    if isinstance(case.callback, int):
        mask_mod = words_mask_mod(case.callback)
    else:
        mask_mod = getattr(sparse_mla_mask, f"{case.callback}_mask_mod")

    @cute.jit
    def mask_block(mask, thr_mma, ahead, aux, b, m_block, n_block, first, out):
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
            mask_causal=case.causal,
            mask_mod=mask_mod,
            aux_data=AuxData(aux, None),
            vec_size=mask_mod.__vec_size__,
            words_ahead=ahead,
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
                        b, Int32(case.num_queries), Int32(0), mSeqUsedK=k_lens
                    )
                    tile = AttentionMask(
                        TILE_M, tile_n, info, qhead_per_kvhead_packgqa=case.heads
                    )
                    ahead = None
                    if cutlass.const_expr(case.ahead):
                        ahead = tile.make_words_ahead(thr_mma)
                    at = (tile, thr_mma, ahead, aux, b, m_block)
                    last = cute.ceil_div(k_lens[b], tile_n) - 1
                    mask_block(*at, last, True, out)
                    for i in range(last):
                        mask_block(*at, last - 1 - i, False, out)

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
    shape = (len(case.k_lens), case.num_queries, case.words)
    mask = between_forbidden_pages(shape)
    mask.random_(-(2**31), 2**31, generator=generator)
    starts = case.starts or (0,) * len(case.k_lens)
    aux = [mask]
    if case.reserved_word:
        mask[:, 0, -1] = torch.tensor(starts, dtype=torch.int32)
    elif case.starts:
        aux.append(torch.tensor(starts, dtype=torch.int32))
    bits = ((mask[..., None] >> torch.arange(32)) & 1).bool().flatten(2)
    columns = case.tile_n * -(-max(case.k_lens) // case.tile_n)
    num_rows = case.num_queries * case.heads
    query = torch.arange(num_rows) // case.heads
    flip = (torch.arange(num_rows) % case.heads == 1)[:, None]
    expected = torch.full((len(case.k_lens), num_rows, columns), UNVISITED)
    for b, (start, k_len) in enumerate(zip(starts, case.k_lens)):
        visited = case.tile_n * -(-k_len // case.tile_n)
        expected[b, :, :visited] = -math.inf
        keep = bits[b, query, start : start + k_len] ^ flip
        if case.causal:
            keep &= torch.arange(k_len) <= query[:, None] + k_len - case.num_queries
        expected[b, :, :k_len].masked_fill_(keep, 1.0)

    out = torch.full((len(case.k_lens), ROWS, columns), UNVISITED)
    key_starts = to_cute(aux[1]) if len(aux) > 1 else None
    k_lens = to_cute(torch.tensor(case.k_lens, dtype=torch.int32))
    compile_masking(case)(to_cute(mask), key_starts, k_lens, to_cute(out))
    exact = torch.equal(out[:, :num_rows], expected)
    if isinstance(case.callback, int):
        return exact

    # SM100 calls the callback itself, for every group of columns with a key.
    callback = getattr(sparse_mla_mask, f"{case.callback}_mask_mod")
    kept = columns_kept(callback, aux, case.num_queries, max(case.k_lens))
    kept_bits = ((kept[..., None] >> torch.arange(32)) & 1).bool().flatten(2)
    alone = all(
        torch.equal(kept_bits[b, :, :k_len], bits[b, :, start : start + k_len])
        for b, (start, k_len) in enumerate(zip(starts, case.k_lens))
    )
    return exact and alone


if __name__ == "__main__":
    for name in ARGUMENTS.cases or [x for x in CASES if x not in ARGUMENTS.without]:
        line = {"case": name, "exact": is_exact(CASES[name])}
        print(json.dumps(line), flush=True)

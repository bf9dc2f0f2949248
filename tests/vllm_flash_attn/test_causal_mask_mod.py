# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Causal attention with a ``mask_mod`` on SM100: where the diagonal is needed.

The kernel walks a tile's key blocks in three loops: the last block, those on the
diagonal, the rest. Only the first two apply the diagonal.
"""

import itertools

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

from vllm.vllm_flash_attn.cute import utils
from vllm.vllm_flash_attn.cute.block_info import BlockInfo
from vllm.vllm_flash_attn.cute.seqlen_info import SeqlenInfoQK

TILE_N = 128
NUM_TILES = 3


def rest_of_blocks(tile_m: int) -> torch.Tensor:
    """Blocks of the third loop, by FA4's own arithmetic, compiled for the host.

    Returns:
        int32 ``[longest query, longest key sequence, row tiles]``, -1 where a query has
        no such tile. Lengths count from 1.
    """
    length = NUM_TILES * tile_m
    out = torch.full((length, length, NUM_TILES), -1, dtype=torch.int32)

    @cute.jit
    def run(out: cute.Tensor, longest: Int32):
        blocks = BlockInfo(tile_m, TILE_N, is_causal=True)
        for q in range(longest):
            for k in range(longest):
                seqlen = SeqlenInfoQK.create(Int32(0), q + 1, k + 1)
                for m_block in range(cute.ceil_div(q + 1, tile_m)):
                    first, last = blocks.get_n_block_min_max(seqlen, m_block)
                    stop = blocks.get_n_block_min_causal_local_mask(
                        seqlen, m_block, first
                    )
                    # The first loop takes one block, the second those down to `stop`.
                    rest = cutlass.min(last - 1, stop) - first
                    out[q, k, m_block] = cutlass.max(rest, 0)

    argument = from_dlpack(out).mark_layout_dynamic(2)
    cute.compile(run, argument, Int32(length))(argument, Int32(length))
    return out


@pytest.mark.parametrize("tile_m", [128, 256], ids="{}-rows".format)
def test_no_block_of_the_third_loop_has_a_later_key(tile_m):
    rest = rest_of_blocks(tile_m)
    q_len = torch.arange(1, rest.shape[0] + 1)[:, None, None]
    k_len = torch.arange(1, rest.shape[1] + 1)[None, :, None]
    first_row = tile_m * torch.arange(NUM_TILES)
    last_key_of_first_row = first_row + k_len - q_len
    exists = first_row < q_len

    assert torch.equal(rest >= 0, exists.expand_as(rest))
    last_key_of_loop = rest * TILE_N - 1
    loops = exists & (rest > 0)
    assert (
        loops.any() and not (loops & (last_key_of_loop > last_key_of_first_row)).any()
    )
    # That can fail: two keys further on some would.
    assert (loops & (last_key_of_loop + 2 > last_key_of_first_row)).any()


@cute.jit
def keep_words(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """A word of 32 keys, also for keys behind the diagonal."""
    row = (utils.ssa_to_scalar(batch), utils.ssa_to_scalar(q_idx))
    words = cute.make_rmem_tensor(1, dtype=cutlass.Uint32)
    words[0] = cutlass.Uint32(aux_tensors[0][(*row, utils.ssa_to_scalar(kv_idx) >> 5)])
    return words.load()


keep_words.__vec_size__ = 32


@pytest.mark.gpu
@pytest.mark.parametrize("k_len", [1, 128, 129, 640, 1000])
@pytest.mark.parametrize("q_len", [1, 128, 257, 640])
def test_the_diagonal_holds_for_masks_that_cross_it(q_len, k_len):
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    if torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs compute capability 10")
    torch.manual_seed(q_len + k_len)
    lens_q, lens_k = (q_len, 129), (k_len, 300)
    num_heads, scale = 2, 192**-0.5
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn((sum(lens_q), num_heads, 192), **make)
    k = torch.randn((sum(lens_k), num_heads, 192), **make)
    v = torch.randn((sum(lens_k), num_heads, 128), **make)
    num_words = -(-max(lens_k) // TILE_N) * TILE_N // 32
    rows = -(-max(lens_q) // 256) * 256
    keep = torch.rand((2, rows, num_words, 32), device="cuda") < 0.5
    weights = 1 << torch.arange(32, device="cuda")
    words = (keep * weights).sum(-1).int()

    def cumulative(lengths):
        total = list(itertools.accumulate(lengths, initial=0))
        return torch.tensor(total, dtype=torch.int32, device="cuda")

    out = torch.full((sum(lens_q), num_heads, 128), float("nan"), **make)
    _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=cumulative(lens_q),
        cu_seqlens_k=cumulative(lens_k),
        max_seqlen_q=max(lens_q),
        max_seqlen_k=max(lens_k),
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        mask_mod=keep_words,
        aux_tensors=[words],
        out=out,
    )
    torch.cuda.synchronize()

    keep = keep.flatten(-2)
    split = zip(out.split(lens_q), q.split(lens_q), k.split(lens_k), v.split(lens_k))
    for b, (got, query, key, value) in enumerate(split):
        n_q, n_k = lens_q[b], lens_k[b]
        position = torch.arange(n_q, device="cuda")[:, None] + n_k - n_q
        kept = keep[b, :n_q, :n_k] & (torch.arange(n_k, device="cuda") <= position)
        scores = scale * torch.einsum("qhd,khd->hqk", query.double(), key.double())
        weight = scores.masked_fill(~kept, float("-inf")).softmax(-1).nan_to_num(0.0)
        expected = torch.einsum("hqk,khd->qhd", weight, value.double())
        error = (got - expected).norm(dim=-1)
        assert (error <= 2e-2 * expected.norm(dim=-1)).all()

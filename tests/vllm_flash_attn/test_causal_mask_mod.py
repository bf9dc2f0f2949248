# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Causal attention, with a ``mask_mod`` and without: where the diagonal is needed.

The kernels walk a tile's key blocks in three loops: the last block, those on the
diagonal, the rest. Only the first two apply the diagonal.
"""

import itertools
from dataclasses import dataclass

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


@cute.jit
def keep_bit(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """The same, key by key."""
    row = (utils.ssa_to_scalar(batch), utils.ssa_to_scalar(q_idx))
    key = utils.ssa_to_scalar(kv_idx)
    word = cutlass.Uint32(aux_tensors[0][(*row, key >> 5)])
    bit = (word >> cutlass.Uint32(key & 31)) & cutlass.Uint32(1)
    return utils.scalar_to_ssa(bit != 0, cutlass.Boolean)


@dataclass
class Inputs:
    """Two requests, packed or as dense batch, and a random mask for them."""

    lens_q: tuple[int, int]
    lens_k: tuple[int, int]
    is_varlen: bool

    def __post_init__(self):
        make = {"dtype": torch.bfloat16, "device": "cuda"}
        self.q = torch.randn((sum(self.lens_q), 2, 192), **make)
        self.k = torch.randn((sum(self.lens_k), 2, 192), **make)
        self.v = torch.randn((sum(self.lens_k), 2, 128), **make)
        num_words = -(-max(self.lens_k) // TILE_N) * TILE_N // 32
        rows = -(-max(self.lens_q) // 256) * 256
        self.keep = torch.rand((2, rows, num_words, 32), device="cuda") < 0.5
        weights = 1 << torch.arange(32, device="cuda")
        self.words = (self.keep * weights).sum(-1).int()

    def attend(self, mask_mod=None) -> torch.Tensor:
        from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

        layout = {}
        tensors = self.q, self.k, self.v, torch.full_like(self.q[..., :128], torch.nan)
        if self.is_varlen:
            layout = {
                "cu_seqlens_q": cumulative(self.lens_q),
                "cu_seqlens_k": cumulative(self.lens_k),
                "max_seqlen_q": max(self.lens_q),
                "max_seqlen_k": max(self.lens_k),
            }
        else:
            tensors = (x.view(2, -1, *x.shape[1:]) for x in tensors)
        q, k, v, out = tensors
        mask = {}
        if mask_mod is not None:
            mask = {"mask_mod": mask_mod, "aux_tensors": [self.words]}
        _flash_attn_fwd(q, k, v, out=out, causal=True, num_splits=1, **mask, **layout)
        torch.cuda.synchronize()
        return out.view(-1, *out.shape[-2:])

    def check(self, out: torch.Tensor, has_mask: bool, is_causal: bool) -> None:
        """Against float64."""
        keep = self.keep.flatten(-2) | (not has_mask)
        parts = [out.split(self.lens_q), self.q.split(self.lens_q)]
        parts += [self.k.split(self.lens_k), self.v.split(self.lens_k)]
        for b, (got, query, key, value) in enumerate(zip(*parts)):
            n_q, n_k = self.lens_q[b], self.lens_k[b]
            position = torch.arange(n_q, device="cuda")[:, None] + n_k - n_q
            before = torch.arange(n_k, device="cuda") <= position
            kept = keep[b, :n_q, :n_k] & (before | (not is_causal))
            scores = torch.einsum("qhd,khd->hqk", query.double(), key.double())
            scores = (192**-0.5 * scores).masked_fill(~kept, float("-inf"))
            weight = scores.softmax(-1).nan_to_num(0.0)
            expected = torch.einsum("hqk,khd->qhd", weight, value.double())
            error = (got - expected).norm(dim=-1)
            assert (error <= 2e-2 * expected.norm(dim=-1)).all()


def cumulative(lengths) -> torch.Tensor:
    total = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(total, dtype=torch.int32, device="cuda")


LAYOUTS = {"varlen": (129, 300), "dense": None}


@pytest.mark.gpu
@pytest.mark.parametrize("other", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("k_len", [1, 128, 129, 640, 1000])
@pytest.mark.parametrize("q_len", [1, 128, 257, 640])
def test_the_diagonal_holds(q_len, k_len, other):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs compute capability 9 or 10")
    torch.manual_seed(q_len + k_len)
    lens = zip((q_len, k_len), other or (q_len, k_len))
    inputs = Inputs(*lens, is_varlen=other is not None)
    inputs.check(inputs.attend(), has_mask=False, is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("other", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("k_len", [1, 128, 129, 640, 1000])
@pytest.mark.parametrize("q_len", [1, 128, 257, 640])
def test_the_diagonal_holds_for_masks_that_cross_it(q_len, k_len, other):
    from vllm.vllm_flash_attn.cute.interface import _resolve_causal_local_window

    if torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs compute capability 10")
    torch.manual_seed(q_len + k_len)
    lens = zip((q_len, k_len), other or (q_len, k_len))
    inputs = Inputs(*lens, is_varlen=other is not None)
    out = inputs.attend(keep_words)
    # Some FA4 take a mask_mod alone, and let go of causal beside it.
    is_causal, *_ = _resolve_causal_local_window(True, None, None, keep_words)
    inputs.check(out, has_mask=True, is_causal=is_causal)
    assert torch.equal(out, inputs.attend(keep_bit))

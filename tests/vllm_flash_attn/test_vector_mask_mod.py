# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vectorised callbacks against the scalar one on SM90, bit for bit.

A random mask, of which the scalar callback reads a bit a call and the others whole
words. Masks have no more rows than there are queries, and no more words than cover the
keys of the longest request.
"""

import functools
import itertools

import cutlass
import cutlass.cute as cute
import pytest
import torch

from vllm.vllm_flash_attn.cute import utils
from vllm.vllm_flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

VEC_SIZES = (2, 8, 32, 64, 128)
# Column tiles: 128 keys, 128 keys, 80 keys. A kernel takes longer to compile than to
# test: with `--dist loadgroup` one worker has all tests of it.
HEAD_DIMS = [
    pytest.param(dims, id=name, marks=pytest.mark.xdist_group(name))
    for name, dims in (
        ("128", (128, 128)),
        ("192-128", (192, 128)),
        ("256", (256, 256)),
    )
]
HEADS = {"mha": (4, 4), "gqa": (8, 2)}
DENSE = [(1, 1), (128, 128), (113, 203), (300, 1000), (1024, 129)]
VARLEN = {
    "one": ([257], [640]),
    "many": ([129, 1, 300, 128, 64], [640, 300, 1, 80, 513]),
}
gpu = pytest.mark.gpu


@pytest.fixture(name="sm90")
def sm90_fixture():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    torch.manual_seed(0)


@functools.cache
def vector_mask_mod(vec_size: int):
    """The mask's words, ``vec_size`` keys a call; bit ``j`` of a word is key ``j``."""
    num_words = max(vec_size // 32, 1)

    @cute.jit
    def mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        words = cute.make_rmem_tensor(num_words, dtype=cutlass.Uint32)
        for i in cutlass.range_constexpr(num_words):
            at = (batch[0], q_idx[0], (kv_idx[0] >> 5) + i)
            words[i] = cutlass.Uint32(aux_tensors[0][at])
        words[0] = words[0] >> cutlass.Uint32(kv_idx[0] & 31)
        return words.load()

    mask_mod.__vec_size__ = vec_size
    return mask_mod


@cute.jit
def scalar_mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    key = utils.ssa_to_scalar(kv_idx)
    at = (utils.ssa_to_scalar(batch), utils.ssa_to_scalar(q_idx), key >> 5)
    word = cutlass.Uint32(aux_tensors[0][at])
    bit = (word >> cutlass.Uint32(key & 31)) & cutlass.Uint32(1)
    return utils.scalar_to_ssa(bit != 0, cutlass.Boolean)


def random_mask(batch: int, num_queries: int, num_keys: int) -> torch.Tensor:
    """int32 ``[batch, num_queries, words]``, whole groups of 128 keys."""
    shape = (batch, num_queries, -(-num_keys // 128) * 4)
    return torch.randint(-(2**31), 2**31, shape, device="cuda").int()


def qkv(head_dims, heads, shape_q, shape_k):
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn((*shape_q, heads[0], head_dims[0]), **make)
    k = torch.randn((*shape_k, heads[1], head_dims[0]), **make)
    v = torch.randn((*shape_k, heads[1], head_dims[1]), **make)
    return q, k, v


def attend(q, k, v, mask_mod, mask, **kwargs):
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    nan = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype)
    out, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        out=nan.to(q.device),
        mask_mod=mask_mod,
        aux_tensors=[mask],
        return_lse=True,
        pack_gqa=q.shape[-2] != k.shape[-2],
        **kwargs,
    )
    torch.cuda.synchronize()
    assert not out.isnan().any()
    return out, lse


def assert_equal(results, expected):
    for name, got, want in zip(("out", "lse"), results, expected):
        assert torch.equal(got, want), name


def cumulative(lengths) -> torch.Tensor:
    total = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(total, dtype=torch.int32, device="cuda")


@gpu
@pytest.mark.parametrize("vec_size", VEC_SIZES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", DENSE)
def test_dense(sm90, seqlen_q, seqlen_k, head_dims, heads, vec_size):
    q, k, v = qkv(head_dims, heads, (2, seqlen_q), (2, seqlen_k))
    mask = random_mask(2, seqlen_q, seqlen_k)
    expected = attend(q, k, v, scalar_mask_mod, mask)
    assert_equal(attend(q, k, v, vector_mask_mod(vec_size), mask), expected)


@gpu
@pytest.mark.parametrize("vec_size", VEC_SIZES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("lengths", VARLEN.values(), ids=VARLEN)
def test_varlen(sm90, lengths, head_dims, heads, vec_size):
    q_lens, k_lens = lengths
    q, k, v = qkv(head_dims, heads, (sum(q_lens),), (sum(k_lens),))
    mask = random_mask(len(q_lens), max(q_lens), max(k_lens))
    varlen = {
        "cu_seqlens_q": cumulative(q_lens),
        "cu_seqlens_k": cumulative(k_lens),
        "max_seqlen_q": max(q_lens),
        "max_seqlen_k": max(k_lens),
    }
    # The scalar callback is asked for whole tiles, past the mask too.
    padded = torch.nn.functional.pad(mask, (0, 4, 0, 256))
    expected = attend(q, k, v, scalar_mask_mod, padded, **varlen)
    assert_equal(attend(q, k, v, vector_mask_mod(vec_size), mask, **varlen), expected)


@gpu
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 1000), (640, 640)])
def test_causal_changes_nothing_of_a_causal_mask(
    sm90, seqlen_q, seqlen_k, head_dims, heads
):
    q, k, v = qkv(head_dims, heads, (2, seqlen_q), (2, seqlen_k))
    words = random_mask(2, seqlen_q, seqlen_k)
    keys = torch.arange(32 * words.shape[2], device="cuda")
    rows = torch.arange(seqlen_q, device="cuda")[:, None] + seqlen_k - seqlen_q
    below = (keys <= rows).view(seqlen_q, -1, 32) << torch.arange(32, device="cuda")
    words &= below.sum(-1).int()
    expected = attend(q, k, v, scalar_mask_mod, words)
    results = attend(q, k, v, vector_mask_mod(128), words, causal=True)
    assert_equal(results, expected)


@gpu
@pytest.mark.parametrize("vec_size", [32, 128])
@pytest.mark.parametrize("head_dims", [(128, 128)], ids=["128"])
def test_block_sparsity(sm90, head_dims, vec_size):
    """Every other block partly, the blocks between them fully or not at all."""
    seqlen, heads, tile = 1024, (2, 2), 128
    q, k, v = qkv(head_dims, heads, (1, seqlen), (1, seqlen))
    mask = random_mask(1, seqlen, seqlen)
    num_tiles = seqlen // tile
    shape = (1, heads[0], num_tiles)

    def blocks(start: int, step: int):
        chosen = torch.arange(start, num_tiles, step, device="cuda").int()
        count = torch.full(shape, len(chosen), dtype=torch.int32, device="cuda")
        index = torch.zeros((*shape, num_tiles), dtype=torch.int32, device="cuda")
        index[..., : len(chosen)] = chosen
        return count, index

    mask_cnt, mask_idx = blocks(0, 2)
    full_cnt, full_idx = blocks(1, 4)
    sparse = BlockSparseTensorsTorch(
        mask_block_cnt=mask_cnt,
        mask_block_idx=mask_idx,
        full_block_cnt=full_cnt,
        full_block_idx=full_idx,
        block_size=(tile, tile),
    )
    kwargs = {"block_sparse_tensors": sparse, "tile_mn": (tile, tile)}
    expected = attend(q, k, v, scalar_mask_mod, mask, **kwargs)
    results = attend(q, k, v, vector_mask_mod(vec_size), mask, **kwargs)
    assert_equal(results, expected)


@gpu
def test_the_backward_pass_refuses_what_it_would_misread(sm90):
    from vllm.vllm_flash_attn.cute.interface import flash_attn_func

    q, k, v = (x.requires_grad_() for x in qkv((128, 128), (2, 2), (1, 128), (1, 128)))
    out, *_ = flash_attn_func(
        q,
        k,
        v,
        mask_mod=vector_mask_mod(32),
        aux_tensors=[random_mask(1, 128, 128)],
    )
    with pytest.raises(NotImplementedError, match="does not support calls for one"):
        out.sum().backward()


@gpu
@pytest.mark.parametrize(
    "name, value", [("__vec_size__", 96), ("__column_alignment__", 256)]
)
def test_sizes_that_are_no_powers_of_two_or_too_large_are_refused(sm90, name, value):
    @cute.jit
    def mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return cute.make_rmem_tensor(4, dtype=cutlass.Uint32).load()

    mask_mod.__vec_size__ = 128
    setattr(mask_mod, name, value)
    q, k, v = qkv((128, 128), (2, 2), (1, 128), (1, 128))
    with pytest.raises(ValueError, match=f"must be a power of two.*got {value}"):
        attend(q, k, v, mask_mod, random_mask(1, 128, 128))


@gpu
def test_a_column_alignment_is_part_of_what_a_callback_is_known_by(sm90):
    def mask_mod():
        pass

    mask_mod.__vec_size__ = 128
    known = {utils.hash_callable(mask_mod)}
    for alignment in (1, 32):
        mask_mod.__column_alignment__ = alignment
        known.add(utils.hash_callable(mask_mod))
    assert len(known) == 3

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The reference attention against plain dense softmax, and its two oracles."""

import functools

import pytest
import torch

from vllm_sparse_mla.testing import reference

Q_LENS, K_LENS = [1, 0, 33, 7], [129, 5, 64, 40]
HEADS, QK_DIM, V_DIM, TOPK = 3, 24, 16, 12
SCALE = QK_DIM**-0.5


def dense_mask_mod():
    raise AssertionError("the stand-in must not call the callback")


def offset_dense_mask_mod():
    raise AssertionError("the stand-in must not call the callback")


def _cu(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def _case(dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    randn = functools.partial(torch.randn, generator=generator)
    q = randn(sum(Q_LENS), HEADS, QK_DIM).to(dtype)
    k = randn(sum(K_LENS), HEADS, QK_DIM).to(dtype)
    v = randn(sum(K_LENS), HEADS, V_DIM).to(dtype)
    rows = [
        torch.randint(-1, k_len, (q_len, TOPK), generator=generator)
        for q_len, k_len in zip(Q_LENS, K_LENS)
    ]
    return q, k, v, _cu(Q_LENS), _cu(K_LENS), torch.cat(rows).int()


def _keep(topk: torch.Tensor) -> list[torch.Tensor]:
    """Dense boolean grids, set one index at a time."""
    grids, row = [], 0
    for q_len, k_len in zip(Q_LENS, K_LENS):
        grid = torch.zeros(q_len, k_len, dtype=torch.bool)
        for i in range(q_len):
            for key in topk[row + i].tolist():
                if 0 <= key < k_len:
                    grid[i, key] = True
        grids.append(grid)
        row += q_len
    return grids


def _pack(grids: list[torch.Tensor], key_starts: list[int] | None = None):
    """Pack grids into `[B, Q, W]` words; request `b` begins at bit `key_starts[b]`."""
    starts = key_starts or [0] * len(grids)
    words = max(s + g.shape[1] for s, g in zip(starts, grids)) // 32 + 2
    words = -(-words // 4) * 4
    mask = torch.zeros(len(grids), max(g.shape[0] for g in grids), words).long()
    for b, grid in enumerate(grids):
        for i, key in grid.nonzero().tolist():
            bit = starts[b] + key
            mask[b, i, bit // 32] |= 1 << (bit % 32)
    return torch.where(mask >= 2**31, mask - 2**32, mask).int()


def _dense(q, k, v, grids):
    """Plain softmax over a dense boolean grid, one request and head at a time."""
    out = torch.zeros(q.shape[0], HEADS, V_DIM, dtype=torch.float64)
    lse = torch.full((HEADS, q.shape[0]), float("-inf"), dtype=torch.float64)
    q0 = k0 = 0
    for grid in grids:
        q1, k1 = q0 + grid.shape[0], k0 + grid.shape[1]
        for h in range(HEADS):
            scores = SCALE * q[q0:q1, h].double() @ k[k0:k1, h].double().t()
            for i in grid.any(dim=-1).nonzero().flatten().tolist():
                row = scores[i][grid[i]]
                out[q0 + i, h] = row.softmax(-1) @ v[k0:k1, h].double()[grid[i]]
                lse[h, q0 + i] = row.logsumexp(-1)
        q0, k0 = q1, k1
    return out, lse


def _assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numel", [1 << 24, 200], ids=["one-block", "many-blocks"])
def test_both_oracles_agree_with_dense_softmax(monkeypatch, numel):
    monkeypatch.setattr(reference, "_MAX_TEMPORARY_NUMEL", numel)
    *tensors, topk = _case()
    topk[5] = -1  # a row without keys
    topk[6, 3] = 2**31 - 1
    topk[7, 0] = -7
    grids = _keep(topk)
    expected = _dense(*tensors[:3], grids)
    assert torch.isneginf(expected[1][:, 5]).all()
    _assert_same(
        reference.masked_attention_varlen(
            *tensors, _pack(grids), softmax_scale=SCALE, dtype=torch.float64
        ),
        expected,
    )
    _assert_same(
        reference.gathered_topk_attention(*tensors, topk, softmax_scale=SCALE),
        expected,
    )


def test_causal_is_aligned_at_the_bottom_right():
    *tensors, topk = _case()
    grids = _keep(topk)
    causal = [g.tril(g.shape[1] - g.shape[0]) for g in grids]
    expected = _dense(*tensors[:3], causal)
    _assert_same(
        reference.masked_attention_varlen(
            *tensors, _pack(grids), softmax_scale=SCALE, causal=True
        ),
        expected,
    )
    offsets = torch.tensor([k - q for q, k in zip(Q_LENS, K_LENS)])
    _assert_same(
        reference.gathered_topk_attention(
            *tensors, topk, softmax_scale=SCALE, query_offsets=offsets
        ),
        expected,
    )


def test_without_a_mask_every_key_counts():
    *tensors, _ = _case()
    grids = [torch.ones(q, k, dtype=torch.bool) for q, k in zip(Q_LENS, K_LENS)]
    _assert_same(
        reference.masked_attention_varlen(*tensors, None, softmax_scale=SCALE),
        _dense(*tensors[:3], grids),
    )


def test_shared_key_heads_are_repeated():
    q, k, v, *cu, topk = _case()
    k, v = k[:, :1], v[:, :1]
    expanded = (x.expand(-1, HEADS, -1) for x in (k, v))
    _assert_same(
        reference.gathered_topk_attention(q, k, v, *cu, topk, softmax_scale=SCALE),
        reference.gathered_topk_attention(q, *expanded, *cu, topk, softmax_scale=SCALE),
    )


@pytest.mark.parametrize("start", [0, 1, 31, 32, 37, 130])
@pytest.mark.parametrize("where", ["reserved word", "second aux tensor"])
def test_stand_in_reads_the_mask_from_a_key_start(start, where):
    *tensors, topk = _case(torch.bfloat16)
    grids = _keep(topk)
    starts = torch.tensor([start, 0, start + 1, 5]).int()
    mask = _pack(grids, starts.tolist())
    aux, leading = [mask], [2]
    if where == "reserved word":
        mask[:, 0, -1] = starts
    else:
        aux, leading = [mask, starts], [2, 0]
    out, lse = reference.flash_attn_varlen_func(
        **dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), tensors)),
        max_seqlen_q=max(Q_LENS),
        max_seqlen_k=max(K_LENS),
        softmax_scale=SCALE,
        return_softmax_lse=True,
        mask_mod=offset_dense_mask_mod,
        aux_tensors=aux,
        aux_tensor_leading_dims=leading,
    )
    expected, expected_lse = _dense(*tensors[:3], grids)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    eager, _ = reference.masked_attention_varlen(
        *tensors, _pack(grids), softmax_scale=SCALE
    )
    error = reference.attention_error(out, expected)
    assert (error <= reference.attention_error_budget(expected, eager)).all()


def test_stand_in_sees_through_a_front_and_rejects_what_fa4_would_misread():
    def front():
        raise AssertionError

    *tensors, topk = _case(torch.float32)
    mask = _pack(_keep(topk))
    call = functools.partial(
        reference.flash_attn_varlen_func,
        **dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), tensors)),
        max_seqlen_k=max(K_LENS),
        aux_tensor_leading_dims=[2],
    )
    call = functools.partial(call, max_seqlen_q=max(Q_LENS), aux_tensors=[mask])
    with pytest.raises(ValueError, match="mask_mod must be dense_mask_mod"):
        call(mask_mod=front)
    front.__packed_mask_mod__ = dense_mask_mod
    assert torch.equal(call(mask_mod=front), call(mask_mod=dense_mask_mod))
    assert not torch.equal(call(mask_mod=front), call())
    for match, changed in {
        "max_seqlen_q must be": {"max_seqlen_q": 32},
        "aux_tensors must hold": {"aux_tensors": None},
        "whole 16-byte groups": {"aux_tensors": [mask[:, :, :5]]},
        "mask rows must hold": {"aux_tensors": [mask[:, :, :4]]},
        "fa_version must be 4": {"fa_version": 3},
        "aux_tensor_leading_dims": {"aux_tensor_leading_dims": [1]},
    }.items():
        with pytest.raises(ValueError, match=match):
            call(mask_mod=dense_mask_mod, **changed)


def test_a_lost_key_exceeds_the_error_budget():
    *tensors, topk = _case(torch.bfloat16)
    grids = _keep(topk)
    expected, _ = _dense(*tensors[:3], grids)
    eager, _ = reference.masked_attention_varlen(
        *tensors, _pack(grids), softmax_scale=SCALE
    )
    budget = reference.attention_error_budget(expected, eager)
    grids[2][20, grids[2][20].nonzero()[0]] = False
    broken, _ = reference.masked_attention_varlen(
        *tensors, _pack(grids), softmax_scale=SCALE, dtype=torch.float32
    )
    over = reference.attention_error(broken, expected) > budget
    assert over.nonzero().flatten().tolist() == [Q_LENS[0] + 20]
    assert reference.attention_error(broken / 0, expected).isinf().all()


def test_merge_of_two_key_ranges_equals_the_whole():
    q, k, v, *cu, topk = _case()
    split = 20
    first = topk.where(topk < split, -1)
    second = topk.where(topk >= split, -1)
    whole, whole_lse = reference.gathered_topk_attention(
        q, k, v, *cu, topk, softmax_scale=SCALE
    )
    parts = [
        reference.gathered_topk_attention(q, k, v, *cu, t, softmax_scale=SCALE)
        for t in (first, second)
    ]
    out, lse = torch.empty_like(whole), torch.empty_like(whole_lse)
    reference.merge_attn_states(out, *parts[0], *parts[1], output_lse=lse)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_merge_of_empty_parts():
    inf = float("inf")
    prefix, suffix = torch.full((4, 1, 2), 3.0), torch.full((4, 1, 2), 5.0)
    prefix_lse = torch.tensor([[-inf, 0.0, -inf, 0.0]])
    suffix_lse = torch.tensor([[-inf, -inf, inf, 0.0]])
    out, lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    reference.merge_attn_states(
        out, prefix, prefix_lse, suffix, suffix_lse, lse, prefill_tokens_with_context=3
    )
    assert out[:, 0, 0].tolist() == [0.0, 3.0, 0.0, 5.0]
    assert lse.tolist() == [[-inf, 0.0, -inf, 0.0]]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The mask builder's front and kernels, bit for bit against a dense boolean grid."""

import pytest
import torch

from vllm.model_executor.layers.attention.sparse_mla_attention import (
    _build_topk_mask,
    _topk_mask_shape,
)
from vllm_sparse_mla.testing.masks import CANARY, MaskCall, random_topk

INT32_MAX = 2**31 - 1

PACKED_FRONT = "stock has no builder over packed rows"
OUT_OF_RANGE = "stock writes out of the row where an index is past its last key"
NO_CHECKS = "stock checks nothing before it launches"
STALE_WORDS = "stock leaves words past the last key as they were"
OWN_ROW_COUNT = "stock places a request's rows by max_q_len, not by out's batch stride"


def build_packed(*args):
    from vllm.model_executor.kernels.attention.dsa import topk_mask

    *args, context_lens, range_starts = args
    return topk_mask.build_packed_topk_mask(
        *args, context_lens=context_lens, range_starts=range_starts
    )


def build_by_request(topk, cu_q_lens, max_q_len, num_keys, out, *_):
    q_lens = cu_q_lens.diff().tolist()
    per_request = list(topk.split(q_lens))
    return _build_topk_mask(per_request, q_lens, max_q_len, num_keys, out)


def every_key(topk, q_lens, num_keys, device, max_q_len=None):
    """A call whose keys all come before the queries."""
    return MaskCall(
        topk.to(device),
        q_lens,
        max_q_len or max(q_lens),
        num_keys,
        [INT32_MAX] * len(q_lens),
    )


@pytest.mark.parametrize(
    "num_keys",
    [
        *(
            pytest.param(size, marks=pytest.mark.stock_fails(STALE_WORDS))
            for size in (1, 31, 32, 33, 129, 4097)
        ),
        127,
        128,
    ],
)
def test_keys_at_every_edge(num_keys, device):
    topk = random_topk(5, 64, num_keys, seed=num_keys)
    every_key(topk, [5], num_keys, device).check(build_by_request)


@pytest.mark.parametrize("num_queries", [1, 7, 128, 129, 256, 257])
def test_queries_at_every_edge(num_queries, device):
    topk = random_topk(num_queries, 16, 128, seed=num_queries)
    every_key(topk, [num_queries], 128, device).check(build_by_request)


@pytest.mark.stock_fails(OWN_ROW_COUNT)
@pytest.mark.parametrize(
    "q_lens",
    [
        pytest.param([0, 3, 5], id="empty-first"),
        pytest.param([3, 0, 5], id="empty-middle"),
        pytest.param([3, 5, 0], id="empty-last"),
        pytest.param([0, 0, 0], id="all-empty"),
        pytest.param([1, 9, 4], id="unequal"),
    ],
)
def test_several_requests(q_lens, device):
    topk = random_topk(sum(q_lens), 32, 256)
    every_key(topk, q_lens, 256, device, max_q_len=12).check(build_by_request)


@pytest.mark.stock_fails(OUT_OF_RANGE, run=False)  # a write 256 MiB away: it crashes
@pytest.mark.parametrize("q_lens", [[6], [2, 4]], ids=["one-request", "two-requests"])
def test_hostile_indices_set_nothing_and_write_nowhere(q_lens, device):
    topk = random_topk(sum(q_lens), 48, 100, hostile=True)
    topk[0] = INT32_MAX
    every_key(topk, q_lens, 100, device, max_q_len=128).check(build_by_request)


@pytest.mark.stock_fails(STALE_WORDS)
@pytest.mark.parametrize("num_topk", [1, 3, 1024, 1025, 2048])
def test_topk_of_any_width_and_row_stride(num_topk, device):
    topk = random_topk(4, num_topk, 3000, seed=num_topk, padding=5, device=device)
    every_key(topk, [4], 3000, device).check(build_by_request)


def test_a_view_keeps_the_rows_of_its_storage(device):
    topk = torch.tensor([[0, 128]], dtype=torch.int32, device=device)
    out = torch.zeros(_topk_mask_shape(1, 1, 129), dtype=torch.int32, device=device)
    mask = _build_topk_mask([topk], [1], 1, 129, out)
    assert mask.shape == (1, 1, 8)
    assert mask.stride() == out.stride()
    assert mask.data_ptr() == out.data_ptr()
    assert mask.flatten().tolist() == [1, 0, 0, 0, 1, 0, 0, 0]


def test_duplicates_and_rows_without_keys(device):
    topk = torch.tensor([[7, 7, 7, 7], [-1, -1, -1, -1]], dtype=torch.int32)
    view = every_key(topk, [2], 128, device).build(build_by_request)
    assert view.flatten().tolist() == [128, 0, 0, 0] + [0] * 4


def test_requests_without_any_query_row(device):
    out = torch.full((2, 128, 4), -1, dtype=torch.int32, device=device)
    assert _build_topk_mask([], [], 0, 128, out).shape == (0, 0, 4)
    empty = torch.empty((0, 8), dtype=torch.int32, device=device)
    assert _build_topk_mask([empty], [0], 0, 128, out).shape == (1, 0, 4)
    assert (out == -1).all()


@pytest.mark.stock_fails(PACKED_FRONT)
@pytest.mark.parametrize(
    ("contexts", "starts"),
    [
        pytest.param(None, None, id="pure"),
        pytest.param([31, 0, 64], None, id="whole"),
        pytest.param([INT32_MAX, 5, 90], None, id="unbounded"),
        pytest.param([37, 0, 250], [37, 0, 250], id="suffix"),
        pytest.param([290, 99, 31], [200, 31, 0], id="chunks"),
        pytest.param([INT32_MAX] * 3, [INT32_MAX, 5, 299], id="past-every-key"),
    ],
)
def test_rows_keep_keys_of_their_range_up_to_their_query(contexts, starts, device):
    q_lens, num_keys = [3, 0, 40], 96
    topk = random_topk(43, 40, 300, hostile=True)
    topk[::3, ::2] = torch.arange(20) + 3  # around the diagonal of a pure prefill
    topk[1::3, :3] = INT32_MAX
    call = MaskCall(topk.to(device), q_lens, 40, num_keys, contexts, starts)
    call.check(build_packed)


@pytest.mark.stock_fails(PACKED_FRONT)
@pytest.mark.parametrize("contexts", [None, [0], [64]], ids=str)
def test_rows_of_later_keys_alone_are_empty(contexts, device):
    first = contexts[0] if contexts else 0
    topk = torch.arange(5)[:, None] + torch.tensor([first + 1, first + 40])
    topk = torch.cat((topk, torch.full((5, 1), INT32_MAX)), dim=1).int()
    topk = topk.to(device)
    assert (MaskCall(topk, [5], 5, 128, contexts).words(build_packed) == 0).all()
    # One key earlier, each row's first is that of its query.
    view = MaskCall(topk - 1, [5], 5, 128, contexts).words(build_packed)
    assert (view != 0).sum(-1).tolist() == [[1] * 5]


def _call(device, **changes):
    # Stock, which checks nothing, writes past `out`, but not past this buffer.
    buffer = torch.full((4096,), CANARY, dtype=torch.int32, device=device)
    arguments = dict(
        topk_indices_per_req=[torch.zeros((2, 4), dtype=torch.int32, device=device)],
        q_lens=[2],
        max_q_len=2,
        max_seq_len=128,
        out=buffer[:512].view(1, 128, 4),
    )
    return _build_topk_mask(**(arguments | changes))


@pytest.mark.stock_fails(NO_CHECKS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"max_seq_len": 129}, "out is too small", id="too-few-words"),
        pytest.param({"max_q_len": 129}, "out is too small", id="too-few-rows"),
        pytest.param({"q_lens": [3]}, "q_lens", id="rows-do-not-match"),
        pytest.param({"q_lens": [2, 0]}, "one tensor a request", id="missing-request"),
        pytest.param({"max_q_len": 1}, "max_q_len", id="more-rows-than-max"),
    ],
)
def test_bad_sizes_are_refused_before_a_launch(change, message, device):
    with pytest.raises(ValueError, match=message):
        _call(device, **change)


@pytest.mark.stock_fails(NO_CHECKS)
@pytest.mark.parametrize(
    ("make_out", "message"),
    [
        pytest.param(lambda o: o.long(), "out must be int32", id="int64"),
        pytest.param(lambda o: o[0], "out must be 3-D", id="two-dimensions"),
        pytest.param(lambda o: o[..., ::2], "last stride 1", id="strided-words"),
        pytest.param(lambda o: o[..., 1:5], "start at a multiple", id="unaligned"),
        pytest.param(
            lambda o: o.flatten()[:1200].view(1, 200, 6)[..., :4],
            "row strides",
            id="odd-rows",
        ),
    ],
)
def test_bad_storage_is_refused_before_a_launch(make_out, message, device):
    buffer = torch.full((8192,), CANARY, dtype=torch.int32, device=device)
    out = buffer[: 128 * 12].view(1, 128, 12)
    with pytest.raises(ValueError, match=message):
        _call(device, out=make_out(out))
    assert (buffer == CANARY).all()


@pytest.mark.stock_fails(NO_CHECKS)
def test_topk_rows_of_another_type_are_refused(device):
    rows = torch.zeros((2, 4), dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="topk must be int32"):
        _call(device, topk_indices_per_req=[rows])

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CuTe DSL mask kernel on a GPU, bit for bit against a dense boolean grid.

Also the file to run under compute-sanitizer: `-k sanitized` selects small cases that
reach every path of the kernel.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from vllm_sparse_mla.testing import masks
from vllm_sparse_mla.testing.masks import MaskCall

INT32_MAX = 2**31 - 1

random_topk = functools.partial(masks.random_topk, device="cuda")

gpu = pytest.mark.gpu


pytestmark = pytest.mark.stock_fails("stock has no CuTe DSL mask kernel")


@pytest.fixture(scope="module")
def module():
    from vllm.model_executor.kernels.attention.dsa import topk_mask_cutedsl

    return topk_mask_cutedsl


@pytest.fixture(scope="module")
def kernel(module):
    return module.TOPK_MASK_KERNEL


def prepare(
    topk, q_lens, max_q_len, num_keys, contexts=None, starts=None, causal=False
):
    """Without context lengths every key comes before the queries, or none if causal."""
    if not (causal or contexts):
        contexts = [INT32_MAX] * len(q_lens)
    return MaskCall(topk, q_lens, max_q_len, num_keys, contexts, starts)


def causal_topk(rows, topk):
    """Consecutive keys up to the diagonal, then -1: what short rows look like."""
    index = torch.arange(topk, device="cuda").repeat(rows, 1)
    index[index > torch.arange(rows, device="cuda")[:, None]] = -1
    return index.int()


@gpu
@pytest.mark.parametrize("num_queries", [1, 2, 127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("num_keys", [1, 31, 32, 33, 127, 128, 129, 1000, 4096, 4097])
def test_queries_and_keys_at_every_edge(num_queries, num_keys, kernel):
    topk = random_topk(num_queries, 64, num_keys, seed=num_keys, hostile=True)
    prepare(topk, [num_queries], num_queries, num_keys).check(kernel)


@gpu
@pytest.mark.parametrize("num_keys", [131071, 131072, 131073, 262177, 1 << 20])
@pytest.mark.parametrize("padding", [0, 1], ids=["vectorized", "scalar"])
def test_rows_wider_than_a_tile(num_keys, padding, kernel):
    topk = random_topk(9, 2048, num_keys, hostile=True, padding=padding)
    topk[:, :4] = torch.tensor([0, num_keys - 1, 131071, 131072], device="cuda")
    prepare(topk, [5, 4], 6, num_keys).check(kernel)


@gpu
@pytest.mark.parametrize(
    "num_topk", [1, 2, 3, 4, 5, 127, 512, 2047, 2048, 2049, 2052, 4096, 5003]
)
@pytest.mark.parametrize(
    ("offset", "padding"),
    [(0, 0), (0, 4), (4, 4), (0, 1), (1, 3), (3, 0)],
    ids=lambda n: str(n),
)
def test_topk_of_any_width_and_alignment(num_topk, offset, padding, kernel):
    topk = random_topk(
        7, num_topk, 3000, seed=num_topk, hostile=True, offset=offset, padding=padding
    )
    prepare(topk, [7], 7, 3000).check(kernel)


@gpu
@pytest.mark.parametrize("rows", [1, 300, 3000])
def test_runs_of_consecutive_keys(rows, kernel):
    prepare(causal_topk(rows, 2048), [rows], rows, 4096).check(kernel)


@gpu
def test_all_keys_one_key_and_no_key(kernel):
    topk = torch.stack(
        [
            torch.arange(2048),
            torch.arange(2047, -1, -1),
            torch.full((2048,), 7),
            torch.full((2048,), -1),
        ]
    )
    prepare(topk.int().cuda(), [4], 4, 2048).check(kernel)


@gpu
@pytest.mark.parametrize(
    "q_lens",
    [
        [0, 3, 5],
        [3, 0, 5],
        [3, 5, 0],
        [0, 0],
        [1] * 300,
        [700, 1, 0, 33, 128, 257, 2, 64],
    ],
    ids=["empty-first", "empty-middle", "empty-last", "empty", "many", "unequal"],
)
@pytest.mark.parametrize("with_context", [False, True])
def test_several_requests_with_rows_to_spare(q_lens, with_context, kernel):
    topk = random_topk(sum(q_lens), 96, 900, hostile=True)
    contexts = list(range(5, 5 + len(q_lens))) if with_context else None
    prepare(topk, q_lens, max(q_lens) + 3, 900, contexts, causal=True).check(kernel)


@gpu
@pytest.mark.parametrize("padding", [0, 1], ids=["vectorized", "scalar"])
@pytest.mark.parametrize("contexts", [None, [490, 37, 0, INT32_MAX, 200100, 640]])
def test_ranges(padding, contexts, kernel):
    starts = [0, 37, 4096, INT32_MAX, 200000, 11]
    topk = random_topk(60, 512, 210000, hostile=True, padding=padding)
    for column, key in enumerate((37, 36, 676, 677, 4096, 200000, 199999)):
        topk[:, column] = key
    prepare(topk, [10] * 6, 12, 640, contexts, starts).check(kernel)


@gpu
def test_a_range_of_a_row_wider_than_a_tile(kernel):
    topk = random_topk(8, 2048, 400000, hostile=True)
    prepare(topk, [4, 4], 4, 262145, [200000, 399990], [101, 131072]).check(kernel)


@gpu
@pytest.mark.parametrize("context", [None, 1, 31, 130, 4000])
def test_keys_after_their_query_are_dropped(context, kernel):
    topk = random_topk(300, 2048, 4400, hostile=True)
    topk[::3] = torch.arange(2048, device="cuda") + (context or 0) + 290
    topk[1::3, ::5] = INT32_MAX
    contexts = context and [context, context + 7]
    prepare(topk, [290, 10], 290, 4400, contexts, causal=True).check(kernel)


@gpu
@pytest.mark.parametrize("num_queries", [4096, 8192])
def test_more_rows_than_blocks(num_queries, kernel):
    topk = random_topk(num_queries, 2048, 8192)
    prepare(topk, [num_queries], num_queries, 8192).check(kernel)


@gpu
def test_topk_offsets_past_32_bits(kernel):
    rows, stride = 10, 1 << 28
    topk = torch.empty(rows * stride, dtype=torch.int32, device="cuda")
    topk = topk.view(rows, stride)[:, :64]
    topk.copy_(random_topk(rows, 64, 500))
    prepare(topk, [rows], rows, 500).check(kernel)


@gpu
def test_mask_offsets_past_32_bits(kernel):
    topk = random_topk(4, 64, 4096)
    call = prepare(topk, [2, 2], 2, 4096)
    _, cu_q_lens, *_, contexts, starts = call.arguments
    flat = torch.empty((1 << 31) + 256, dtype=torch.int32, device="cuda")
    out = flat.as_strided((2, 2, 128), (1 << 31, 128, 1))
    kernel(topk, cu_q_lens, 2, 4096, out, contexts, starts)
    assert torch.equal(out, call.expected())


@gpu
@pytest.mark.parametrize("index", range(6))
def test_sanitized(index, kernel):
    """One small case for each path, for memcheck and racecheck."""
    plain = random_topk(40, 2048, 4000, hostile=True)
    ragged = random_topk(40, 2051, 4000, hostile=True, offset=1)
    tail = random_topk(40, 2051, 4000, hostile=True, padding=1)
    wide = random_topk(6, 64, 200000, hostile=True)
    cases = [
        prepare(plain, [40], 40, 4000),
        prepare(ragged, [30, 0, 10], 33, 4000, [1, 2, 3000]),
        prepare(tail, [30, 10], 30, 4000, [99, 3000], [5, 90]),
        prepare(wide, [6], 6, 200000),
        prepare(causal_topk(64, 2048), [64], 64, 2048),
        prepare(plain, [13] * 3, 15, 700, causal=True),
    ]
    cases[index].check(kernel)


@gpu
def test_twenty_runs_agree(kernel):
    call = prepare(random_topk(1000, 2048, 8192), [600, 400], 600, 8192)
    first = call.build(kernel).clone()
    for _ in range(20):
        call.poison()
        assert torch.equal(call.build(kernel), first)


@gpu
def test_two_streams_with_two_masks(kernel):
    both = [
        prepare(random_topk(3000, 2048, 16384, seed=seed), [3000], 3000, 16384)
        for seed in (1, 2)
    ]
    streams = [torch.cuda.Stream() for _ in both]
    expected = [call.expected() for call in both]
    torch.cuda.synchronize()
    for _ in range(20):
        for call, stream in zip(both, streams):
            with torch.cuda.stream(stream):
                call.poison()
                call.build(kernel)
    torch.cuda.synchronize()
    for call, words in zip(both, expected):
        assert torch.equal(call.view, words)


@gpu
def test_runs_on_the_current_stream_of_a_graph(kernel):
    call = prepare(random_topk(64, 2048, 4096), [64], 64, 4096)
    call.build(kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        view = call.build(kernel)
    call.poison()
    graph.replay()
    assert torch.equal(view, call.expected())


@gpu
def test_no_length_compiles_anything(module):
    kernel = module.TopkMaskKernel()
    kernel.warmup(
        SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(index_topk=2048)
            )
        )
    )
    compiled = set(kernel._compiled_cache)
    for length in range(100, 5000, 517):
        topk = random_topk(length, 2048, length)
        starts = [0, 40]
        halves = [length // 3, length - length // 3]
        prepare(topk, [length], length, length).build(kernel)
        prepare(topk, halves, length, length, causal=True).build(kernel)
        prepare(topk, halves, length, length, starts, starts).build(kernel)
    assert set(kernel._compiled_cache) == compiled
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("batch", "max_q", "words", "grid"),
    [
        # 132 multiprocessors of 8 blocks hold 1056.
        pytest.param(1, 1, 4, (1, 1, 1), id="one-row"),
        pytest.param(1, 1056, 1024, (1056, 1, 1), id="a-block-a-row"),
        pytest.param(1, 1057, 1024, (529, 1, 1), id="two-rows-a-block"),
        pytest.param(1, 4096, 1024, (1024, 1, 1), id="four-rows-a-block"),
        pytest.param(8, 600, 1024, (120, 8, 1), id="requests"),
        pytest.param(1, 9, 4096, (9, 1, 1), id="one-tile"),
        pytest.param(1, 9, 4100, (9, 1, 2), id="two-tiles"),
        pytest.param(1, 4096, 32768, (128, 1, 8), id="a-million-keys"),
    ],
)
def test_grid_fills_the_gpu_once(batch, max_q, words, grid, module):
    assert module.plan_grid(batch, max_q, words, num_sms=132) == grid


@pytest.mark.parametrize(
    ("batch", "words", "name"),
    [(65536, 4, "batch_size"), (1, 65536 * 4096, "pieces per row")],
)
def test_a_grid_without_room_is_refused(batch, words, name, module):
    with pytest.raises(ValueError, match=f"{name} must be at most 65535, got 65536"):
        module.plan_grid(batch, 1, words, num_sms=132)


@pytest.mark.parametrize(
    ("offset", "columns", "expected"),
    [(0, 8, True), (4, 16, True), (1, 8, False), (0, 6, False)],
)
def test_rows_are_vectorizable(offset, columns, expected, module):
    storage = torch.zeros(4096, dtype=torch.int32)
    first = -storage.data_ptr() % 16 // 4
    topk = storage[first + offset :][: 3 * columns].view(3, columns)
    assert module.rows_are_vectorizable(topk) is expected


@pytest.mark.parametrize(("topk", "vectorized"), [(2048, True), (2049, False)])
def test_warmup_covers_what_the_layer_asks_for(topk, vectorized, module):
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=topk))
    )
    key = module.TOPK_MASK_KERNEL.CompileKey
    assert module.TOPK_MASK_KERNEL.get_warmup_keys(config) == [key(vectorized)]


def test_a_model_without_topk_warms_up_nothing(module):
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=object()))
    assert module.TOPK_MASK_KERNEL.get_warmup_keys(config) == []

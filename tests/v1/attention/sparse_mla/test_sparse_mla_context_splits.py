# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Few new tokens over many cached ones: on SM90 FA4 takes the keys in parts."""

from dataclasses import replace

import pytest

from vllm.model_executor.layers.attention import sparse_mla_attention

try:
    from vllm.model_executor.layers.attention import sparse_mla_sm90
except ImportError:  # stock: every test here fails, as marked
    sparse_mla_sm90 = None
from vllm_sparse_mla.testing.layer import DEEPSEEK, GLM

pytestmark = pytest.mark.stock_fails("stock never splits the keys of a context")

H200_MULTIPROCESSORS = 132


@pytest.fixture
def on_an_h200(monkeypatch):
    """As many multiprocessors as it has."""
    monkeypatch.setattr(
        sparse_mla_sm90, "num_compute_units", lambda: H200_MULTIPROCESSORS
    )


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(
    ("tokens", "requests", "keys", "heads", "splits"),
    [
        pytest.param(16, 1, 14000, 16, 8, id="few-queries"),
        pytest.param(16, 1, 14000, 8, 16, id="few-heads"),
        pytest.param(256, 1, 32512, 16, 4, id="two-rows-of-blocks"),
        pytest.param(64, 4, 14000, 16, 2, id="four-requests"),
        pytest.param(512, 1, 8192, 16, 2, id="four-rows-of-blocks"),
        pytest.param(1024, 1, 8192, 16, 1, id="the-gpu-is-full"),
        pytest.param(16, 1, 14000, 128, 1, id="full-by-heads"),
        pytest.param(16, 1, 2048, 16, 4, id="short-context"),
        pytest.param(16, 1, 511, 16, 1, id="shorter-than-a-part"),
        pytest.param(16, 1, 65536, 1, 32, id="as-many-as-one-merge-takes"),
        pytest.param(1, 1, 14000, 16, 1, id="one-query"),
    ],
)
@pytest.mark.parametrize("opted_in", [False, True])
def test_the_number_of_parts(
    monkeypatch, opted_in, tokens, requests, keys, heads, splits
):
    monkeypatch.setattr(sparse_mla_sm90, "sm90_masked_mha_enabled", lambda: opted_in)
    number = sparse_mla_sm90.context_splits(tokens, requests, keys, heads)
    assert number == (splits if opted_in else 1)


CONTINUED = [(16, 14000)] * 4


# As measured in docs/results/prefill-choice-h200.md.
@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(
    ("requests", "heads", "one_pass"),
    [
        pytest.param([(4096, 0), *CONTINUED], 16, True, id="beside-a-prompt"),
        pytest.param([(2048, 0), *CONTINUED], 16, True, id="beside-half-a-prompt"),
        pytest.param([(4096, 0), *CONTINUED], 8, False, id="beside-half-the-heads"),
        pytest.param([(2048, 0), (256, 32512)], 16, False, id="one-long-row"),
        pytest.param([(4096, 0), (16, 29984)], 16, False, id="one-longer-row"),
        pytest.param([(512, 8192)], 16, False, id="alone"),
        pytest.param([(1024, 16384)], 16, True, id="the-gpu-is-full"),
        pytest.param([(1, 14000), (1, 0)], 16, True, id="never-in-parts"),
    ],
)
def test_what_is_attended_to_in_one_call(requests, heads, one_pass):
    assert sparse_mla_sm90.one_pass_is_faster(*zip(*requests), heads) is one_pass


SPANS = [(0, 0, 40), (1, 1100, 1116)]


@pytest.mark.parametrize("per_range", [False, True], ids=["whole", "per-range"])
def test_the_layer_splits_what_the_offset_callback_reads(
    make_world, monkeypatch, per_range
):
    asked = []

    def two_parts(*chunk: int) -> int:
        asked.append(chunk)
        return 2

    monkeypatch.setattr(sparse_mla_attention, "context_splits", two_parts)
    world = make_world([1116] * 2)
    step = world.step(SPANS, per_range=per_range)
    output = world.run(step)
    assert asked == ([] if per_range else [(16, 1, 1100, world.dims.num_heads)])
    found = {(call.causal, call.num_splits) for call in world.calls}
    assert found == {(True, 1), (False, 1 if per_range else 2)}
    world.assert_right(step, output)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("model", [DEEPSEEK, GLM], ids=["192/128", "256/256"])
def test_against_float64(make_world, model, heads):
    world = make_world([9000] * 3, dims=replace(model, num_heads=heads), block_size=64)
    for spans in (
        [(0, 0, 2100), (1, 8500, 8516)],
        [(0, 8191, 8193), (1, 4001, 4200), (2, 8999, 9000)],
    ):
        world.calls.clear()
        step = world.step(spans, chunk_rows=8192)
        output = world.run(step)
        parts = [call.num_splits for call in world.calls if not call.causal]
        if sparse_mla_sm90.sm90_masked_mha_enabled():
            assert max(parts) > 1
        else:
            assert set(parts) == {1}
        world.assert_right(step, output)

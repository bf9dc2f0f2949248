# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Contexts and new tokens in one call of FA4, from one gather of whole sequences."""

import weakref
from dataclasses import replace

import pytest

try:
    from vllm.model_executor.layers.attention import sparse_mla_context
except ImportError:  # stock: every test here fails, as marked
    sparse_mla_context = None

from vllm_sparse_mla.testing.layer import DEEPSEEK, GLM, MODELS

pytestmark = [
    pytest.mark.stock_fails("stock attends to contexts apart"),
    pytest.mark.usefixtures("one_pass"),
]

# (prompt, start, stop) of each request; prompts have 420 tokens.
CONTINUED = [(0, 37, 60), (1, 0, 50), (2, 401, 420)]
NUM_TOKENS = sum(stop for _, _, stop in CONTINUED)
ONE_CALL = [("dense_mask_mod", True, False)]


@pytest.fixture
def world(make_world):
    return make_world([420] * 3)


def calls(world):
    return [(call.callback, call.causal, call.return_lse) for call in world.calls]


def test_decodes_in_front(world):
    step = world.step(CONTINUED, decodes=5)
    world.assert_right(step, world.run(step))
    assert calls(world) == ONE_CALL


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_dimensions_of_real_models(make_world, model):
    dims = replace(model, num_heads=2, index_topk=64)
    world = make_world([420] * 3, dims=dims, block_size=64)
    step = world.step(CONTINUED)
    world.assert_right(step, world.run(step))
    assert calls(world) == ONE_CALL


@pytest.mark.parametrize("rows", [NUM_TOKENS, NUM_TOKENS - 1], ids=["fits", "too-long"])
def test_whole_sequences_have_to_fit_the_context_workspace(world, rows):
    step = world.step(CONTINUED, chunk_rows=rows)
    world.assert_right(step, world.run(step))
    assert (calls(world) == ONE_CALL) is (rows == NUM_TOKENS)


def test_the_mask_has_to_fit_its_workspace(world):
    step = world.step(CONTINUED, per_range=True)
    world.assert_right(step, world.run(step))
    assert calls(world)[0] == ("dense_mask_mod", True, True)


@pytest.mark.parametrize("spans", [CONTINUED, CONTINUED[1:2]], ids=["context", "pure"])
@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.parametrize("opted_in", [True, False])
def test_who_takes_it(world, monkeypatch, opted_in, is_faster, spans):
    asked = []

    def one_pass_is_faster(*step):
        asked.append(step)
        return is_faster

    monkeypatch.setattr(sparse_mla_context, "sm90_masked_mha_enabled", lambda: opted_in)
    monkeypatch.setattr(sparse_mla_context, "one_pass_is_faster", one_pass_is_faster)
    prefill = world.step(spans).metadata.prefill
    takes = sparse_mla_context.takes_one_pass(prefill, 16)
    assert takes is (opted_in and is_faster and spans is CONTINUED)
    assert sparse_mla_context.takes_one_pass(prefill, 16) is takes
    if takes:  # once a step
        (step,) = asked
        assert sorted(zip(*step[:2])) == [(19, 401), (23, 37), (50, 0)]
        assert step[2] == 16


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "fp8"])
def test_new_tokens_of_a_quantized_cache_are_taken_as_they_come(make_world, dtype):
    dims = replace(DEEPSEEK, num_heads=16, index_topk=64, kv_cache_dtype=dtype)
    world = make_world([420] * 3, dims=dims, block_size=64)
    step = world.step(CONTINUED)
    world.assert_right(step, world.run(step))
    assert len(calls(world)) > 1


def test_context_parallelism_is_refused(world):
    world.impl.dcp_world_size = 2
    with pytest.raises(NotImplementedError, match="context parallelism"):
        world.run(world.step(CONTINUED))


def test_layers_of_a_step_share_a_plan(world):
    first, second = (world.step(CONTINUED).metadata for _ in range(2))
    whole = sparse_mla_context.whole_sequences(first)
    assert sparse_mla_context.whole_sequences(first) is whole
    assert sparse_mla_context.whole_sequences(second) is not whole
    (chunk,) = whole.prefill.chunked_context.chunks
    assert chunk.cu_seq_lens.tolist() == [0, 60, 110, 530]
    assert chunk.query_start_loc.tolist() == first.prefill.query_start_loc.tolist()


def test_a_step_keeps_nothing_of_a_layers_call(world):
    step = world.step(CONTINUED)
    world.write_cache(step)
    output = world.new_output(step)
    world.forward(step, world.impl, output)
    freed = weakref.ref(output)
    del output
    assert freed() is None


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("model", [DEEPSEEK, GLM], ids=["192/128", "256/256"])
def test_long_contexts_against_float64(make_world, model, heads):
    heads = min(heads, model.num_heads)
    world = make_world([9000] * 3, dims=replace(model, num_heads=heads), block_size=64)
    for spans in (
        [(0, 0, 600), (1, 8000, 8333)],
        [(0, 8191, 8193), (1, 4001, 4200), (2, 8999, 9000)],
    ):
        world.calls.clear()
        step = world.step(spans, chunk_rows=32768)
        world.assert_right(step, world.run(step))
        assert calls(world) == ONE_CALL

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Masked prefill over quantized KV caches, against an oracle that decodes their rows.

The oracle decodes bit by bit, by the definition of a format, and attends in float64 to
the context as the cache holds it and to new tokens as they come. On a GPU vLLM's own
writer fills the cache and vLLM's own gathers read it.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from vllm_sparse_mla.testing import kv_cache, reference
from vllm_sparse_mla.testing.layer import DEEPSEEK, GLM, GLM_FLASH, Dims

# Stock has no masked MHA over quantized caches.
pytest.importorskip("vllm.model_executor.layers.attention.sparse_mla_kv_cache")

# Not a power of two, so that scaling rounds.
K_SCALE = 0.37
FORMATS = ("fp8_ds_mla", "fp8", "fp8_e4m3", "fp8_e5m2")
models = pytest.mark.parametrize("model", [DEEPSEEK, GLM], ids=["192/128", "256/256"])

# (prompt, start, stop) of each request; prompts have 420 tokens.
SCENARIOS = {
    "no-context": dict(spans=[(0, 0, 33), (1, 0, 50)]),
    "chunks": dict(spans=[(0, 37, 70), (1, 250, 280), (2, 129, 131)], chunk_rows=160),
    "chunks-per-range": dict(
        spans=[(0, 300, 330), (1, 250, 280)], chunk_rows=160, per_range=True
    ),
    "empty-first": dict(spans=[(0, 90, 90), (1, 250, 280)], chunk_rows=160),
    "empty-middle": dict(
        spans=[(0, 37, 70), (1, 150, 150), (2, 301, 330)], chunk_rows=160
    ),
    "empty-last": dict(spans=[(0, 250, 280), (1, 37, 37)]),
    "some-without-context": dict(spans=[(0, 0, 40), (1, 250, 280), (2, 0, 9)]),
    "decodes-in-front": dict(spans=[(0, 37, 70), (1, 250, 280)], decodes=5),
}


def quantized_world(make_world, kv_cache_dtype, model=None, prompts=(420,) * 3):
    on_gpu = torch.cuda.is_available()
    dims = Dims()
    if on_gpu or model or kv_cache_dtype == "fp8_ds_mla":
        heads = 16 if on_gpu else 2
        dims = replace(model or DEEPSEEK, num_heads=heads, index_topk=64)
    return make_world(
        prompts,
        dims=replace(dims, kv_cache_dtype=kv_cache_dtype),
        block_size=64 if on_gpu else 16,
        k_scale=1.0 if kv_cache_dtype == "fp8_ds_mla" else K_SCALE,
    )


@pytest.mark.parametrize(
    ("kv_cache_dtype", "scenario"),
    [
        ("fp8_ds_mla", "chunks"),
        ("fp8_ds_mla", "chunks-per-range"),
        ("fp8", "empty-middle"),
        ("fp8", "decodes-in-front"),
        # Flat like fp8: what differs is the conversion of a byte.
        *(("fp8_e4m3", "chunks"), ("fp8_e5m2", "chunks")),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in itertools.product(("fp8_ds_mla", "fp8"), SCENARIOS)
        ),
    ],
)
def test_scenarios(make_world, kv_cache_dtype, scenario):
    world = quantized_world(make_world, kv_cache_dtype)
    step = world.step(**SCENARIOS[scenario])
    world.assert_right(step, world.run(step))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "fp8"])
@models
def test_dimensions_of_real_models(make_world, model, kv_cache_dtype):
    world = quantized_world(make_world, kv_cache_dtype, model)
    step = world.step([(0, 101, 140), (1, 0, 77)], chunk_rows=64)
    world.assert_right(step, world.run(step))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_rows_without_a_rope_part(make_world, kv_cache_dtype):
    world = quantized_world(make_world, kv_cache_dtype, GLM_FLASH)
    assert world.cache.shape[-1] == 512
    step = world.step([(0, 101, 180), (1, 0, 33)], chunk_rows=64)
    world.assert_right(step, world.run(step))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "fp8"])
def test_contexts_of_every_remainder_in_one_step(make_world, kv_cache_dtype):
    world = quantized_world(make_world, kv_cache_dtype, prompts=[98] * 32)
    spans = [(r, 64 + r, 66 + r) for r in range(32)]
    step = world.step(spans, chunk_rows=320)
    assert len(step.metadata.prefill.chunked_context.chunks) > 8
    world.assert_right(step, world.run(step))


@pytest.mark.gpu
@pytest.mark.parametrize("per_range", [False, True], ids=["whole", "per-range"])
@models
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_every_remainder_of_real_models(make_world, kv_cache_dtype, model, per_range):
    world = quantized_world(make_world, kv_cache_dtype, model)
    for remainder in range(32):
        spans = [(0, 256 + remainder, 350), (1, 320 - remainder, 420)]
        step = world.step(spans, per_range=per_range, chunk_rows=192)
        world.assert_right(step, world.run(step))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_vllms_writer_rounds_to_the_nearest_value(make_world, kv_cache_dtype):
    """The definition that the reader goes by is the one by which vLLM writes."""
    world = quantized_world(make_world, kv_cache_dtype)
    exact = world.latents[0].double()
    read = world.decode(world.rows[0])
    step = 2.0**-3 if kv_cache_dtype == "fp8_e5m2" else 2.0**-4
    smallest = 2.0**-17 if kv_cache_dtype == "fp8_e5m2" else 2.0**-10
    scale = world.k_scale.double()
    if kv_cache_dtype == "fp8_ds_mla":
        assert torch.equal(read[:, 512:], exact[:, 512:])
        read, exact = read[:, :512], exact[:, :512]
        scale = kv_cache.ds_mla_scales(world.rows[0])
    # Divided in float32, so a tie may fall to either side.
    allowed = torch.maximum(step * exact.abs(), smallest * scale) * (1 + 2.0**-20)
    assert ((read - exact).abs() <= allowed).all()
    host = kv_cache.write_latents(
        world.latents[0].cpu(), kv_cache_dtype, world.k_scale.cpu()
    )
    differing = (host != world.rows[0].cpu()).double().mean()
    assert differing < 1e-3, "the writer that stands in on a CPU writes other rows"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "fp8", "fp8_e5m2"])
def test_new_tokens_are_attended_to_as_they_come(make_world, kv_cache_dtype, report):
    """As in vLLM's dense MHA: contexts dequantized, new tokens not quantized at all.

    Sparse MQA reads both from the cache, so its exact answer is another one.
    """
    world = quantized_world(make_world, kv_cache_dtype)
    step = world.step([(0, 130, 180), (1, 0, 60)], chunk_rows=160)
    output = world.run(step)
    exact, budget = world.expected(step)
    assert (reference.attention_error(output, exact) <= budget).all()
    spans = step.spans
    for name, latents in (
        ("all quantized", [world.decode(world.rows[p][:n]) for p, _, n in spans]),
        ("none quantized", [world.latents[p][:n].double() for p, _, n in spans]),
    ):
        other = world.oracle(step, torch.cat(latents))
        difference = (other - exact).flatten(1).norm(dim=-1)
        difference = difference / exact.flatten(1).norm(dim=-1)
        report(
            kind=name,
            kv_cache_dtype=kv_cache_dtype,
            mean_relative_difference=float(difference.mean()),
            largest_relative_difference=float(difference.max()),
        )
        assert (reference.attention_error(output, other) > budget).any(), name


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_another_scale_is_seen(make_world, kv_cache_dtype):
    """Negative control."""
    world = quantized_world(make_world, kv_cache_dtype)
    step = world.step([(0, 130, 160)])
    exact, budget = world.expected(step)
    world.k_scale.mul_(1.1)
    error = reference.attention_error(world.run(step), exact)
    assert (error > budget).any()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "places"),
    [("auto", [33]), ("fp8_ds_mla", [37, 101]), ("fp8", [37, 101]), ("fp8_e5m2", [33])],
    ids=str,
)
def test_a_split_moves_an_answer_by_the_caches_rounding_alone(
    make_world, kv_cache_dtype, places
):
    """Chunk invariance: a prompt in one step, and in steps.

    A split moves tokens into the cache, where they are rounded. What that does to the
    exact answer is known in float64; to it come the budgets of both runs, and no more.
    """
    length = 130
    world = quantized_world(make_world, kv_cache_dtype, prompts=[length])
    whole = world.step([(0, 0, length)])
    exact, budget = world.expected(whole)
    output = world.run(whole)
    moved_at_all = 0.0
    for start, stop in itertools.pairwise([0, *places, length]):
        step = world.step([(0, start, stop)], chunk_rows=64)
        step_output = world.run(step)
        step_exact, step_budget = world.expected(step)
        rows = slice(start, stop)
        moved = reference.attention_error(step_exact, exact[rows])
        moved_at_all = max(moved_at_all, float(moved.max()))
        difference = reference.attention_error(step_output, output[rows])
        assert (difference <= moved + step_budget + budget[rows]).all()
    # In float64 the order of a sum shows too, near 1e-15.
    assert (moved_at_all > 1e-6) is (kv_cache_dtype != "auto")

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The layer on a GPU: vLLM's own gather, merge and FA4, on real models' dimensions.

Judged by the float64 gathered-top-k oracle, and compared with upstream's sparse MQA
backend on the same GPU. SPARSE_MLA_REPORT names a file for the errors as JSON lines.
"""

from dataclasses import replace

import pytest
import torch

from vllm_sparse_mla.testing import reference
from vllm_sparse_mla.testing.layer import DEEPSEEK, GLM, GLM_FLASH

pytestmark = pytest.mark.gpu

LENGTH = 700
TOPK = 256
BLOCK = 64

MODELS = {"192/128": DEEPSEEK, "256/256": GLM}
NO_ROPE = {"256/256 without RoPE": GLM_FLASH}
HEADS = (16, 64, 128)

# (prompt, start, stop); with chunk_rows, the number of decodes in front, per range.
SCENARIOS = {
    "pure": dict(spans=[(0, 0, 600)]),
    "pure-unequal": dict(spans=[(0, 0, 300), (1, 0, 1), (2, 0, 129)]),
    "pure-empty-ends": dict(spans=[(0, 0, 0), (1, 0, 300), (2, 0, 0)]),
    "pure-empty-middle": dict(spans=[(0, 0, 130), (1, 0, 0), (2, 0, 300)]),
    "prefix-cached": dict(spans=[(0, 512, 640), (1, 384, 700)]),
    "unaligned": dict(spans=[(0, 325, 640), (1, 389, 700), (2, 7, 135)]),
    "some-without-context": dict(spans=[(0, 0, 300), (1, 389, 600), (2, 0, 64)]),
    "chunks": dict(spans=[(0, 325, 640), (1, 389, 700)], chunk_rows=192),
    "chunks-per-range": dict(
        spans=[(0, 325, 400), (1, 600, 700)], chunk_rows=192, per_range=True
    ),
    "mixed-batch": dict(spans=[(0, 0, 300), (1, 389, 600)], decodes=5),
    "mixed-batch-chunks": dict(
        spans=[(0, 325, 640), (1, 389, 700)], decodes=37, chunk_rows=192
    ),
}


def model_world(make_world, model, heads):
    dims = (MODELS | NO_ROPE)[model]
    dims = replace(dims, num_heads=heads, index_topk=TOPK)
    return make_world([LENGTH] * 3, dims=dims, block_size=BLOCK)


def make_step(world, spans, **kwargs):
    step = world.step(spans, **kwargs)
    assert world.impl.masked_mha_workspace_fits(step.metadata.prefill)
    return step


def judge(world, step, output, report, **row):
    judgement = world.judge(step, output)
    worst = int(judgement.ratio.argmax())
    report(
        **row,
        rows=len(judgement.error),
        largest_error=float(judgement.error.max()),
        worst_error=float(judgement.error[worst]),
        worst_budget=float(judgement.budget[worst]),
        error_over_budget=float(judgement.ratio[worst]),
    )
    judgement.assert_right()


def judge_scenario(world, report, model, scenario):
    """One of SCENARIOS against float64."""
    step = make_step(world, **SCENARIOS[scenario])
    judge(
        world,
        step,
        world.run(step),
        report,
        kind="float64",
        model=model,
        heads=world.dims.num_heads,
        scenario=scenario,
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("model", MODELS)
def test_scenarios_against_float64(make_world, report, model, heads, scenario):
    judge_scenario(model_world(make_world, model, heads), report, model, scenario)


@pytest.mark.parametrize("per_range", [False, True], ids=["whole", "per-range"])
@pytest.mark.parametrize("model", MODELS)
def test_every_remainder_of_the_context(make_world, report, model, per_range):
    """Two requests, of which the second begins within a chunk of the first."""
    world = model_world(make_world, model, 16)
    for remainder in range(32):
        spans = [(0, 320 + remainder, 420), (1, 544 - remainder, 600)]
        step = make_step(world, spans, chunk_rows=192, per_range=per_range)
        output = world.run(step)
        judge(
            world,
            step,
            output,
            report,
            kind="remainder",
            model=model,
            heads=16,
            scenario=f"context % 32 = {remainder}, per range {per_range}",
        )


@pytest.mark.parametrize("in_context", [True, False], ids=["context", "suffix"])
@pytest.mark.parametrize("per_range", [False, True], ids=["whole", "per-range"])
@pytest.mark.parametrize("model", MODELS)
def test_rows_without_any_key_in_a_range(make_world, model, per_range, in_context):
    world = model_world(make_world, model, 16)
    spans = [(0, 549, 700), (1, 325, 345)]
    world.topk[0][::2] = -1
    world.topk[0][::2, 0] = 3 if in_context else 549
    world.topk[0][::7] = -1
    world.topk[1][:] = -1
    step = make_step(world, spans, chunk_rows=192, per_range=per_range)
    output = world.run(step)
    world.assert_right(step, output)
    without_keys = (step.topk < 0).all(dim=-1)
    assert without_keys.any() and (output[without_keys] == 0).all()


@pytest.mark.parametrize("model", MODELS)
def test_both_mask_paths_give_the_same_output(make_world, model):
    """Also bit for bit: FA4 sees the same keys in the same blocks."""
    world = model_world(make_world, model, 16)
    spans = [(0, 325, 400), (1, 600, 700)]
    whole, ranges = (
        world.run(make_step(world, spans, chunk_rows=192, per_range=per_range))
        for per_range in (False, True)
    )
    assert torch.equal(whole, ranges)


def test_a_model_without_rope(make_world, report):
    (model,) = NO_ROPE
    world = model_world(make_world, model, 16)
    for scenario in ("pure-unequal", "chunks"):
        judge_scenario(world, report, model, scenario)


def absorbed(world, q):
    """Queries of sparse MQA: the nope part in the latents' space, and the RoPE part."""
    d = world.dims
    weight = world.weight.view(d.num_heads, -1, d.kv_lora_rank)
    q_nope, q_pe = q.split((d.qk_nope_head_dim, d.qk_rope_head_dim), dim=-1)
    w_uk = weight[:, : d.qk_nope_head_dim]
    return torch.einsum("thn,hnr->thr", q_nope, w_uk).contiguous(), q_pe.contiguous()


def value_up(world, latent_out):
    d = world.dims
    weight = world.weight.view(d.num_heads, -1, d.kv_lora_rank)
    return torch.einsum("thr,hvr->thv", latent_out, weight[:, d.qk_nope_head_dim :])


def eager_mqa(world, step):
    """Sparse MQA in eager BF16: what its budget is made of."""
    q = torch.cat(absorbed(world, step.q), dim=-1)
    k = torch.cat([world.latents[p][:stop] for p, _, stop in step.spans]).unsqueeze(1)
    v = k[..., : world.dims.kv_lora_rank]
    return value_up(world, world.gathered(step, q, k, v))


@pytest.mark.parametrize("scenario", ["pure-unequal", "unaligned", "chunks"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("model", MODELS)
def test_against_upstreams_sparse_mqa(make_world, report, model, heads, scenario):
    """Both within their budgets of one oracle, so within the sum of each other."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this sparse MQA backend is SM90's")
    from vllm.v1.attention.backends.mla import flashattn_mla_sparse as backend

    world = model_world(make_world, model, heads)
    step = make_step(
        world,
        **SCENARIOS[scenario],
        metadata_cls=backend.FlashAttnMLASparseMetadata,
    )
    masked = world.run(step)
    mqa = world.make_impl(
        backend.FlashAttnMLASparseImpl, topk_indices_buffer=world.topk_buffer
    )
    world.write_cache(step)
    # The kernel may load rows that it masks out: no NaN there.
    world.cache.nan_to_num_(0.0)
    latent_out, _ = mqa.forward_mqa(
        absorbed(world, step.q), world.cache, step.metadata, None
    )
    upstream = value_up(world, latent_out)

    exact, budget = world.expected(step)
    error = reference.attention_error(upstream, exact)
    mqa_budget = reference.attention_error_budget(exact, eager_mqa(world, step))
    difference = reference.attention_error(masked, upstream)
    report(
        kind="sparse MQA",
        model=model,
        heads=heads,
        scenario=scenario,
        rows=len(error),
        mqa_error=float(error.max()),
        mqa_error_over_budget=float((error / mqa_budget).max()),
        masked_error=float(reference.attention_error(masked, exact).max()),
        largest_difference=float(difference.max()),
        difference_over_budget=float((difference / (budget + mqa_budget)).max()),
    )
    world.assert_right(step, masked)
    assert (difference <= budget + mqa_budget).all()

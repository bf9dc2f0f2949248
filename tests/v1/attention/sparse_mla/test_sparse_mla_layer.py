# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The layer's masked prefill against a float64 oracle that never sees a mask.

Each run starts from a mask workspace full of ones between canary words, and from NaN
in the output, the context workspace and every cache row that holds no token.
"""

from dataclasses import replace

import pytest
import torch

from vllm_sparse_mla.testing.layer import DEEPSEEK, GLM_FLASH

INT32_MAX = 2**31 - 1
OUT_OF_RANGE = "stock writes out of the row where an index is past its last key"
NO_ROWS = "stock merges no rows where a split context's request has no queries"
UNALIGNED = "stock's offset callback loses keys where a context is no multiple of 32"

# (prompt, start, stop) of each prefill request; prompts have 420 tokens.
PURE = {
    "one-token": [(0, 0, 1)],
    "one-request": [(0, 0, 200)],
    "one-tile": [(0, 0, 128)],
    "past-one-tile": [(0, 0, 129)],
    "unequal": [(0, 0, 70), (1, 0, 1), (2, 0, 130)],
    "empty-first": [(0, 0, 0), (1, 0, 70)],
    "empty-middle": [(0, 0, 33), (1, 0, 0), (2, 0, 70)],
    "empty-last": [(0, 0, 33), (1, 0, 0)],
}
CONTEXT = {
    "aligned": [(0, 128, 200)],
    "unaligned": [(0, 37, 130)],
    "one-query": [(0, 299, 300)],
    "all-have-context": [(0, 37, 130), (1, 250, 300), (2, 129, 131)],
    "first-has-none": [(0, 0, 60), (1, 250, 300)],
    "middle-has-none": [(0, 37, 60), (1, 0, 50), (2, 401, 420)],
    "last-has-none": [(0, 300, 340), (1, 0, 5)],
    "empty-first": [(0, 90, 90), (1, 250, 300)],
    "empty-middle": [(0, 37, 130), (1, 150, 150), (2, 301, 345)],
    "empty-last": [(0, 250, 300), (1, 37, 37)],
    "empty-chunks": [(0, 400, 400), (1, 250, 300)],
}
# Few queries may miss the keys that stock loses.
STOCK_LOSES_KEYS = CONTEXT.keys() - {"aligned", "one-query", "middle-has-none"}
STOCK_MERGES_NOTHING = {"empty-middle", "empty-chunks"}
ONE_CHUNK, SMALL_CHUNKS = 4096, 160


def table(cases, failing=(), reason=None):
    return [
        pytest.param(spans, id=name, marks=pytest.mark.stock_fails(reason))
        if name in failing
        else pytest.param(spans, id=name)
        for name, spans in cases.items()
    ]


@pytest.fixture
def world(make_world):
    return make_world([420] * 3)


@pytest.fixture
def fa4_arguments(monkeypatch):
    """The arguments of each call of FA4, which nothing answers."""
    import vllm.vllm_flash_attn as package

    seen = []
    monkeypatch.setattr(
        package, "flash_attn_varlen_func", lambda **call: seen.append(call), False
    )
    return seen


def call_fa4(world, mask, **options):
    nothing = dict.fromkeys(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    world.impl._run_masked_mha(
        **nothing, max_seqlen_q=1, max_seqlen_k=1, mask=mask, causal=True, **options
    )


@pytest.mark.stock_fails("stock lets FA4 split keys, and halve the callback's tile")
def test_fa4_is_told_not_to_split_keys(world, fa4_arguments):
    call_fa4(world, torch.zeros(1, 128, 4, dtype=torch.int32))
    (call,) = fa4_arguments
    assert call["num_splits"] == 1


@pytest.mark.stock_fails("stock never names a number of splits")
@pytest.mark.parametrize("num_splits", [0, 2], ids=["fa4-may-split", "two-parts"])
def test_split_keys_never_reach_the_dense_callback(world, fa4_arguments, num_splits):
    mask = torch.zeros(1, 128, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_splits must be 1 without key_starts"):
        call_fa4(world, mask, num_splits=num_splits)
    assert fa4_arguments == []
    starts = torch.zeros(1, dtype=torch.int32)
    call_fa4(world, mask, num_splits=num_splits, key_starts=starts)
    assert [call["num_splits"] for call in fa4_arguments] == [num_splits]


@pytest.mark.stock_fails("stock hands FA4 any mask")
@pytest.mark.parametrize("words", [slice(1, 5), slice(0, 3)], ids=["base", "row"])
def test_a_mask_that_cannot_be_read_never_reaches_fa4(world, fa4_arguments, words):
    mask = torch.zeros(1, 128, 8, dtype=torch.int32)[..., words]
    with pytest.raises(ValueError, match="mask must"):
        call_fa4(world, mask)
    assert fa4_arguments == []


@pytest.mark.parametrize(
    "decodes",
    [
        pytest.param(0, id="no-decodes"),
        pytest.param(3, id="decodes-in-front", marks=pytest.mark.grid),
    ],
)
@pytest.mark.parametrize("spans", table(PURE))
def test_pure_prefill(world, spans, decodes):
    step = world.step(spans, decodes=decodes)
    world.assert_right(step, world.run(step))
    assert [call.callback for call in world.calls] == ["dense_mask_mod"]


@pytest.mark.parametrize(
    "chunk_rows", [pytest.param(ONE_CHUNK, marks=pytest.mark.grid), SMALL_CHUNKS]
)
@pytest.mark.parametrize("spans", table(CONTEXT, STOCK_LOSES_KEYS, UNALIGNED))
def test_context_with_one_mask_of_whole_sequences(world, spans, chunk_rows):
    step = world.step(spans, chunk_rows=chunk_rows)
    world.assert_right(step, world.run(step))
    chunks = step.metadata.prefill.chunked_context.chunks
    with_queries = [c for c in chunks if c.token_slice.start < c.token_slice.stop]
    callbacks = [call.callback for call in world.calls]
    if world.takes_one_pass(step):
        assert callbacks == ["dense_mask_mod"]
    else:
        assert callbacks == ["offset_dense_mask_mod"] * (1 + len(with_queries))


@pytest.mark.stock_fails("stock attends to contexts apart")
@pytest.mark.parametrize("spans", table(CONTEXT | {"one-cached-token": [(0, 1, 130)]}))
def test_context_in_one_pass(world, one_pass, spans):
    step = world.step(spans)
    world.assert_right(step, world.run(step))
    (call,) = world.calls
    assert call.callback == "dense_mask_mod" and call.causal and not call.return_lse


@pytest.mark.parametrize("spans", table(CONTEXT, STOCK_MERGES_NOTHING, NO_ROWS))
def test_context_with_one_mask_a_range(world, spans):
    step = world.step(spans, chunk_rows=SMALL_CHUNKS, per_range=True)
    if not world.impl.masked_mha_workspace_fits(step.metadata.prefill):
        pytest.skip("the ranges' masks are as large as that of the whole sequences")
    world.assert_right(step, world.run(step))
    assert {call.callback for call in world.calls} == {"dense_mask_mod"}


@pytest.mark.stock_fails("stock hands FA4 a batch without query tokens")
@pytest.mark.parametrize("start", [0, 37], ids=["pure", "context"])
def test_requests_without_any_query_token_launch_nothing(world, start):
    step = world.step([(0, start, start), (1, start, start)])
    assert world.run(step).numel() == 0
    assert world.calls == []


@pytest.mark.stock_fails("stock hands FA4 a chunk without query tokens")
def test_a_context_of_no_query_token_is_not_attended_to(world):
    step = world.step([(0, 37, 37), (1, 0, 50)])
    world.assert_right(step, world.run(step))
    assert len(world.calls) == 1


@pytest.mark.stock_fails(UNALIGNED)
def test_decodes_in_front_of_contexts(world):
    step = world.step(CONTEXT["all-have-context"], decodes=5, chunk_rows=SMALL_CHUNKS)
    world.assert_right(step, world.run(step))


def duplicates(rows):
    rows[:, 1::2] = rows[:, ::2]


def only_minus_one(rows):
    rows[::3] = -1


def minus_one_anywhere(rows):
    rows[:, ::2] = -1


def keys_past_the_sequence(rows):
    rows[:, 2] = 419


def hostile(rows):
    rows[:, 0] = INT32_MAX
    rows[:, 3] = -(2**31)
    rows[:, 5] = 420
    rows[:, 7] = 4097


def check_changed_rows(world, spans, change, per_range=False):
    for rows in world.topk:
        change(rows)
    step = world.step(spans, chunk_rows=SMALL_CHUNKS, per_range=per_range)
    output = world.run(step)
    world.assert_right(step, output)
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
    later = step.topk > positions.to(world.device)[:, None]
    without_keys = (later | (step.topk < 0)).all(dim=-1)
    assert (output[without_keys] == 0).all()


@pytest.mark.parametrize(
    "change", [duplicates, minus_one_anywhere, only_minus_one, keys_past_the_sequence]
)
@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([(0, 0, 70), (1, 0, 130)], id="pure"),
        pytest.param([(0, 64, 130), (1, 0, 50), (2, 256, 300)], id="context"),
    ],
)
def test_rows_of_every_kind(world, spans, change):
    check_changed_rows(world, spans, change)


def test_rows_of_only_minus_one_a_range(world):
    spans = [(0, 64, 130), (1, 0, 50), (2, 256, 300)]
    check_changed_rows(world, spans, only_minus_one, per_range=True)


@pytest.mark.stock_fails(OUT_OF_RANGE, run=False)
@pytest.mark.parametrize(
    ("spans", "per_range"),
    [
        pytest.param([(0, 0, 70), (1, 0, 130)], False, id="pure"),
        pytest.param([(0, 37, 130), (1, 0, 50)], False, id="whole"),
        pytest.param([(0, 37, 130), (1, 250, 300)], True, id="per-range"),
    ],
)
def test_hostile_indices(world, spans, per_range):
    check_changed_rows(world, spans, hostile, per_range)


def later_keys(rows):
    """Every row names keys after its query, every third row no others."""
    later = torch.arange(len(rows))[:, None] + torch.arange(1, 1 + rows.shape[1])
    later = later.clamp(max=len(rows)).int().to(rows.device)
    rows[:, ::2] = later[:, ::2]
    rows[::3] = later[::3]
    rows[::3, 1] = INT32_MAX


@pytest.mark.stock_fails(OUT_OF_RANGE, run=False)
@pytest.mark.parametrize(
    ("spans", "per_range"),
    [
        pytest.param([(0, 0, 70), (1, 0, 1), (2, 0, 130)], False, id="pure"),
        pytest.param([(0, 37, 130), (1, 0, 50), (2, 9, 9)], False, id="whole"),
        pytest.param([(0, 37, 130), (1, 250, 300), (2, 0, 9)], True, id="per-range"),
    ],
)
def test_keys_after_their_query_are_not_attended_to(world, spans, per_range):
    """FA4's SM90 kernel, and the host's stand-in, apply no diagonal themselves."""
    check_changed_rows(world, spans, later_keys, per_range)


@pytest.mark.parametrize("in_context", [True, False], ids=["context", "suffix"])
@pytest.mark.parametrize("per_range", [False, True], ids=["whole", "per-range"])
def test_rows_without_any_key_in_a_range(world, in_context, per_range):
    """All keys of every other row lie on one side of the context's end."""
    start, stop = 288, 340
    keys = torch.arange(8) if in_context else torch.full((8,), start)
    world.topk[0][::2] = -1
    world.topk[0][::2, :8] = keys.int().to(world.device)
    step = world.step([(0, start, stop)], chunk_rows=SMALL_CHUNKS, per_range=per_range)
    world.assert_right(step, world.run(step))


def test_sequences_within_the_topk_take_the_dense_path(world, monkeypatch):
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

    seen = []
    monkeypatch.setattr(
        MLACommonBaseImpl, "forward_mha", lambda self, *args: seen.append(args)
    )
    impl = world.impl
    impl._sparse_mla_force_masked_mha = False
    world.run(world.step([(0, 0, world.dims.index_topk)]))
    assert len(seen) == 1
    impl._sparse_mla_force_dense_mha = True
    world.run(world.step([(0, 0, 100)]))
    assert len(seen) == 2


def test_context_parallelism_is_refused(world):
    world.impl.dcp_world_size = 2
    with pytest.raises(NotImplementedError, match="context parallelism"):
        world.run(world.step(CONTEXT["unaligned"]))


@pytest.mark.stock_fails(UNALIGNED)
def test_dimensions_of_a_real_model(make_world):
    dims = replace(DEEPSEEK, num_heads=2, index_topk=64)
    world = make_world([200, 200], dims=dims, block_size=64)
    step = world.step([(0, 101, 140), (1, 0, 77)], chunk_rows=64)
    world.assert_right(step, world.run(step))


@pytest.mark.stock_fails(UNALIGNED)
def test_a_layer_without_rope(make_world):
    world = make_world([200], dims=replace(GLM_FLASH, num_heads=2, index_topk=24))
    step = world.step([(0, 101, 180)], chunk_rows=64)
    world.assert_right(step, world.run(step))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What happens when a mask workspace is too small, and exactly when."""

import logging
import re

import pytest
import torch

import vllm.logger
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    _masked_mha_workspace_fits,
    _topk_mask_shape,
)

SPANS = [(0, 64, 130), (1, 256, 300)]
LONG_SPANS = [(0, 37, 110), (1, 250, 300), (2, 5, 260)]


@pytest.fixture
def world(make_world):
    return make_world([300] * 3)


@pytest.mark.parametrize("spans", [SPANS, LONG_SPANS], ids=["two", "three"])
def test_ranges_begin_one_word_below_the_documented_size(world, spans):
    longest = max(stop - start for _, start, stop in spans)
    batch, rows, words = _topk_mask_shape(len(spans), longest, 300)
    outputs = []
    for numel, callback in (
        (batch * rows * words, "offset_dense_mask_mod"),
        (batch * rows * words - 1, "dense_mask_mod"),
    ):
        world.calls.clear()
        step = world.step(spans, chunk_rows=96, mask_words=numel)
        assert world.impl.masked_mha_workspace_fits(step.metadata.prefill)
        outputs.append(world.run(step))
        assert {call.callback for call in world.calls} == {callback}
    if spans is SPANS:  # aligned, so stock gives it too
        assert torch.equal(*outputs)


@pytest.mark.stock_fails("stock loses keys in the mask of whole sequences")
def test_both_ways_give_the_same_bits_at_unaligned_contexts(world):
    whole, ranges = (
        world.run(world.step(LONG_SPANS, chunk_rows=96, per_range=per_range))
        for per_range in (False, True)
    )
    assert torch.equal(whole, ranges)


def test_the_smallest_workspace_is_that_of_the_largest_range(world):
    prefill = world.step(SPANS, chunk_rows=96).metadata.prefill
    longest_chunk = max(c.max_seq_len for c in prefill.chunked_context.chunks)
    batch, rows, words = _topk_mask_shape(2, 66, max(66, longest_chunk))
    fits = batch * rows * words
    assert _masked_mha_workspace_fits(2, 66, longest_chunk, fits)
    assert not _masked_mha_workspace_fits(2, 66, longest_chunk, fits - 1)
    step = world.step(SPANS, chunk_rows=96, mask_words=fits)
    assert world.impl.masked_mha_workspace_fits(step.metadata.prefill)
    world.assert_right(step, world.run(step))


@pytest.mark.parametrize("spans", [[(0, 0, 130)], SPANS], ids=["pure", "context"])
def test_a_workspace_for_no_mask_is_an_error_before_attention(world, spans):
    step = world.step(spans, chunk_rows=96, mask_words=64)
    assert not world.impl.masked_mha_workspace_fits(step.metadata.prefill)
    with pytest.raises(ValueError, match="workspace") as raised:
        world.run(step)
    # What is needed and what is there.
    assert re.search(r"\d+ int32 words.* 64\b", str(raised.value))
    assert world.calls == []


def test_a_batch_without_room_is_logged_once(world, monkeypatch, caplog):
    vllm.logger._print_warning_once.cache_clear()
    monkeypatch.setattr(sparse_mla_attention.logger, "propagate", True)
    caplog.set_level(logging.WARNING)
    prefill = world.step([(0, 0, 130)], mask_words=64).metadata.prefill
    for _ in range(3):
        assert not world.impl.masked_mha_workspace_fits(prefill)
    messages = [r.getMessage() for r in caplog.records if "top-k mask" in r.message]
    assert len(messages) == 1


def test_no_workspace_means_no_masked_mha(world):
    prefill = world.step(SPANS).metadata.prefill
    prefill.topk_mask_workspace = None
    assert not world.impl.masked_mha_workspace_fits(prefill)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The scheduling harness: what vLLM's scheduler and builder make of prompts."""

import pytest
import torch

from vllm_sparse_mla.testing.masks import causal_topk
from vllm_sparse_mla.testing.steps import EngineStep, ScheduledRun, Workload


@pytest.fixture(scope="module")
def steps() -> list[EngineStep]:
    return list(ScheduledRun(Workload()).steps())


def test_contexts_come_out_unaligned(steps):
    prefills = [
        list(zip(step.context_lens[step.prefills], step.query_lens[step.prefills]))
        for step in steps
    ]
    assert [step for step in prefills if step] == [
        [(0, 300), (0, 212)],
        [(212, 511)],
        [(723, 77), (0, 434)],
        [(434, 83)],
    ]


def test_every_token_is_computed_once_and_keeps_its_slot(steps):
    workload = Workload()
    slots: dict[tuple[int, int], int] = {}
    for step in steps:
        assert sum(step.query_lens) <= workload.token_budget
        slot = iter(step.metadata.slot_mapping.tolist())
        lens = zip(step.requests, step.context_lens, step.query_lens)
        for row, (request, context, query) in enumerate(lens):
            for position in range(context, context + query):
                assert (request, position) not in slots
                slots[request, position] = next(slot)
            blocks = step.metadata.block_table[row].tolist()
            for position in range(context + query):
                block, offset = divmod(position, workload.block_size)
                expected = blocks[block] * workload.block_size + offset
                assert slots[request, position] == expected
    for request, prompt_len in enumerate(workload.prompt_lens):
        # The last token is generated but never computed.
        computed = prompt_len + workload.output_len - 1
        assert all((request, position) in slots for position in range(computed))


def test_prefill_metadata_follows_the_ranges(steps):
    for step in steps:
        prefill = step.metadata.prefill
        contexts = step.context_lens[step.prefills]
        queries = step.query_lens[step.prefills]
        if not queries:
            assert prefill is None
            continue
        assert prefill.query_lens_cpu.tolist() == queries
        assert prefill.max_query_len == max(queries)
        if not any(contexts):
            assert prefill.chunked_context is None
            continue
        assert prefill.chunked_context.context_lens_list == contexts
        covered = [0] * len(contexts)
        for chunk in prefill.chunked_context.chunks:
            requests = range(len(contexts))[chunk.request_slice]
            for request, start, length in zip(
                requests, chunk.starts.tolist(), chunk.seq_lens.tolist()
            ):
                assert start == covered[request]
                covered[request] += length
        assert covered == contexts


def test_a_limit_on_pieces_puts_several_contexts_into_one_step():
    run = ScheduledRun(Workload((300, 650, 517), longest_piece=230))
    most = max(sum(c > 0 for c in s.context_lens[s.prefills]) for s in run.steps())
    assert most >= 2


def test_topk_rows_are_causal_distinct_and_padded():
    rows = causal_topk(41, 8, torch.Generator().manual_seed(0))
    assert rows.shape == (41, 8) and rows.dtype == torch.int32
    for position, row in enumerate(rows.tolist()):
        kept = min(position + 1, 8)
        keys = set(row[:kept])
        assert len(keys) == kept and max(keys) <= position and min(keys) >= 0
        assert row[kept:] == [-1] * (8 - kept)

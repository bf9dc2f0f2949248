# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The walk over a step's context: its chunks, and what keeps it."""

import gc
import weakref

import pytest

try:
    from vllm.model_executor.layers.attention.sparse_mla_context import context_walk
except ImportError:  # stock: every test here fails, as marked
    context_walk = None

pytestmark = pytest.mark.stock_fails("stock plans a walk in every layer")


@pytest.fixture
def world(make_world):
    return make_world([420] * 3)


def test_layers_of_a_step_share_one_walk(world):
    first, second = (world.step([(0, 37, 130)]).metadata for _ in range(2))
    walk = context_walk(first)
    assert context_walk(first) is walk
    assert context_walk(second) is not walk


def test_chunks_without_query_tokens_are_left_out(world):
    """One chunk has the end of one context and the beginning of another."""
    step = world.step([(0, 400, 400), (1, 250, 300)], chunk_rows=160)
    context = step.metadata.prefill.chunked_context
    planned = list(context.chunks)
    empty = [c for c in planned if c.token_slice.start == c.token_slice.stop]
    shared = [c for c in planned if c.num_requests == 2]
    assert empty and [chunk.is_continuation for chunk in shared] == [True]

    walked = context_walk(step.metadata).prefill.chunked_context
    first, *others = walked.chunks
    assert (first.starts is shared[0].starts, first.is_continuation) == (True, False)
    assert others == planned[-len(others) :]
    assert len(walked.chunks) == len(planned) - len(empty)
    # The step's own chunks are dense MHA's too.
    assert context.chunks == planned and shared[0].is_continuation


def test_a_step_is_freed_with_its_last_reference(world):
    """Not by a collection, until when it would hold what it has on the GPU."""
    step = world.step([(0, 37, 130)])
    world.run(step)
    freed = weakref.ref(step.metadata.prefill)
    gc.disable()
    try:
        del step
        assert freed() is None
    finally:
        gc.enable()

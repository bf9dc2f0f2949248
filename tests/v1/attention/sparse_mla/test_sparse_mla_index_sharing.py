# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers that share an indexer result share its mask, and never a stale one.

A model of a step: layers in upstream's index groups run one after another; each
layer's output is judged by the rows that its own buffer holds. Mask workspaces are
filled with ones wherever a wrongly reused mask shall show.
"""

import gc
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder

BUILDS_EVERYWHERE = "stock builds the mask in every layer"
PROMPTS = 2
SPANS = [(0, 64, 120), (1, 0, 40)]


class Model:
    """Layers in the order of their construction; ``I`` has an indexer, ``s`` shares."""

    def __init__(self, world, pattern, buffer=None):
        self.world = world
        self.buffer = world.topk_buffer.clone() if buffer is None else buffer
        builder = SparseMLAIndexGroupBuilder(self.buffer)
        self.indexers = []
        self.layers = []
        for kind in pattern:
            indexer = None
            if kind == "I":
                indexer = SimpleNamespace(topk_indices_buffer=self.buffer)
                self.indexers.append(indexer)
            self.layers.append(
                world.make_impl(
                    indexer=indexer,
                    topk_indices_buffer=None if indexer else self.buffer,
                    index_group_builder=builder,
                )
            )

    def index(self, step):
        """What an indexer does in a step: new rows in the shared buffer."""
        step.write_topk(self.buffer)

    def index_anew(self, step):
        """The same with other rows than the step had."""
        self.world.draw_topk()
        rows = [self.world.topk[p][start:stop] for p, start, stop in step.spans]
        step.topk.copy_(torch.cat(rows))
        self.index(step)

    def run(self, step, *layers):
        for layer in layers:
            output = self.world.run(step, self.layers[layer], write_topk=False)
            self.world.assert_right(step, output)


@pytest.fixture
def world(make_world):
    return make_world([200] * PROMPTS)


@pytest.fixture
def builds(monkeypatch):
    """The size of each mask built, in order."""
    name = "build_packed_topk_mask"
    if not hasattr(sparse_mla_attention, name):
        name = "_build_topk_mask"
    build = getattr(sparse_mla_attention, name)
    built = []

    def counted(*args, **kwargs):
        mask = build(*args, **kwargs)
        built.append(tuple(mask.shape))
        return mask

    monkeypatch.setattr(sparse_mla_attention, name, counted)
    return built


@pytest.mark.stock_fails(BUILDS_EVERYWHERE)
@pytest.mark.parametrize(
    "spans",
    [SPANS, pytest.param([(0, 0, 60), (1, 0, 100)], marks=pytest.mark.grid)],
    ids=str,
)
def test_a_group_builds_once_a_step(world, builds, spans):
    pattern = "IssIss"
    model = Model(world, pattern)
    for _ in range(2):
        step = world.step(spans)
        builds.clear()
        for layer, kind in enumerate(pattern):
            if kind == "I":
                model.index_anew(step)
            model.run(step, layer)
        assert len(builds) == 2


def test_another_step_builds_again_though_the_leader_did_not_run(world, builds):
    model = Model(world, "Is")
    first = world.step(SPANS)
    model.index(first)
    model.run(first, 0, 1)
    world.draw_topk()
    second = world.step(SPANS, mask=first.mask)
    # New metadata in the memory of the old, if the allocator likes.
    del first
    gc.collect()
    second.mask.poison()
    model.index(second)
    builds.clear()
    model.run(second, 1)
    assert len(builds) == 1


def test_another_batch_of_the_same_shape_builds_again(world):
    model = Model(world, "Is")
    mask = world.step([(0, 64, 120)]).mask
    for spans in ([(0, 64, 120)], [(1, 64, 120)], [(0, 64, 120)]):
        step = world.step(spans, mask=mask)
        model.index(step)
        model.run(step, 0, 1)


def test_range_masks_overwrite_the_mask_of_another_step(world, builds):
    """Two batches under way on one workspace; the larger one only fits in ranges."""
    model = Model(world, "Is")
    large = world.step([(0, 100, 190), (1, 130, 190)], chunk_rows=96, per_range=True)
    small = world.step([(0, 64, 100)], mask=large.mask)
    assert model.layers[0].masked_mha_workspace_fits(large.metadata.prefill)

    model.index(small)
    model.run(small, 0)
    model.index(large)
    model.run(large, 0)
    model.index(small)
    builds.clear()
    model.run(small, 1)
    assert len(builds) == 1


@pytest.mark.grid
def test_two_metadata_builders_keep_their_masks_apart(world):
    """Each builder makes its own metadata and workspace; here they also cross."""
    model = Model(world, "Iss")
    one, two = world.step(SPANS), world.step([(1, 64, 120), (0, 0, 40)])
    for layer in range(3):
        for step in (one, two):
            model.index(step)
            model.run(step, layer)
    shared = one.metadata.prefill.topk_mask_workspace
    two.metadata.prefill.topk_mask_workspace = shared
    for layer in range(3):
        for step in (one, two):
            model.index(step)
            model.run(step, layer)


@pytest.mark.parametrize(
    "shared_rows",
    [
        pytest.param(True, id="one-buffer"),
        pytest.param(False, id="two", marks=pytest.mark.grid),
    ],
)
def test_two_groups_interleaved_on_one_workspace(world, shared_rows):
    """A model's groups have one buffer of top-k rows between them."""
    one = Model(world, "Is")
    two = Model(world, "Is", one.buffer if shared_rows else None)
    step = world.step(SPANS)
    rows = [step.topk.clone(), step.topk.flip(1).clone()]
    rows[1][:, ::2] = -1
    for layer in range(2):
        for model, own in zip((one, two), rows):
            step.topk.copy_(own)
            model.index(step)
            model.run(step, layer)


@pytest.mark.parametrize("repoint", ["indexer", "setter"])
def test_a_repointed_buffer_builds_again(world, builds, repoint):
    """Speculative layers read the target's buffer once the draft is loaded."""
    model = Model(world, "Is")
    step = world.step(SPANS)
    model.index(step)
    model.run(step, 0, 1)

    target = world.topk_buffer.clone()
    step.topk[:, ::2] = -1
    step.write_topk(target)
    builds.clear()
    if repoint == "indexer":
        # The leader's indexer is repointed; the follower is given the buffer.
        model.indexers[0].topk_indices_buffer = target
    model.layers[1].topk_indices_buffer = target
    model.run(step, 1)
    assert len(builds) == 1


@pytest.mark.stock_fails(BUILDS_EVERYWHERE)
def test_rows_at_another_place_of_the_buffer_build_again(world, builds):
    model = Model(world, "Iss")
    step = world.step(SPANS)
    model.index(step)
    model.run(step, 0, 1)
    step.metadata.num_decode_tokens = 4
    step.topk[:, ::2] = -1
    model.index(step)
    model.run(step, 2)
    assert len(builds) == 2


def test_the_first_layer_of_a_group_always_builds(world, builds):
    model = Model(world, "Is")
    step = world.step(SPANS)
    for _ in range(2):
        model.index_anew(step)
        model.run(step, 0)
    assert len(builds) == 2


def test_a_second_forward_over_the_same_metadata_builds_again(world, builds):
    """MTP's prefill: a layer that leads a group of its own, on the target's buffer."""
    target = Model(world, "Is")
    draft = Model(world, "Is", buffer=target.buffer)
    step = world.step(SPANS)
    for model in (target, draft, draft):
        model.index_anew(step)
        builds.clear()
        model.run(step, 0, 1)
        assert builds


def test_layers_without_a_group_build_for_themselves(world, builds):
    step = world.step(SPANS)
    layers = [world.make_impl(topk_indices_buffer=world.topk_buffer) for _ in "ab"]
    for layer in layers:
        world.assert_right(step, world.run(step, layer))
    layers[0].index_group = None
    world.assert_right(step, world.run(step, layers[0]))
    assert len(builds) == 3


@pytest.mark.stock_fails(BUILDS_EVERYWHERE)
def test_a_reused_mask_is_not_written_by_those_who_read_it(world):
    model = Model(world, "Iss")
    step = world.step([(0, 96, 180), (1, 150, 200)], chunk_rows=64)
    model.index(step)
    model.run(step, 0)
    words = step.mask.words.clone()
    for layer in (1, 2):
        model.run(step, layer)
        assert torch.equal(step.mask.words, words)

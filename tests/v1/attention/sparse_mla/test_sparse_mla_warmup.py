# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is compiled at start-up is what the layer can call, and nothing by length."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.attention import (
    mla_attention,
    sparse_mla_attention,
)
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

stock_has_none = pytest.mark.stock_fails("stock warms nothing of the masked path up")


def warmup_module():
    from vllm.model_executor.layers.attention import sparse_mla_warmup

    return sparse_mla_warmup


def kernels():
    from vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl import (
        TOPK_MASK_KERNEL,
    )

    return {warmup_module().FA4_MASKED_MHA_KERNEL, TOPK_MASK_KERNEL}


def vllm_config(heads=128, tensor_parallel_size=8, topk=2048, **dims):
    text_config = SimpleNamespace(
        index_topk=topk,
        kv_lora_rank=512,
        qk_nope_head_dim=dims.get("nope", 128),
        qk_rope_head_dim=dims.get("rope", 64),
        v_head_dim=dims.get("v", 128),
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text_config,
            dtype=torch.bfloat16,
            get_num_attention_heads=(
                lambda parallel: heads // parallel.tensor_parallel_size
            ),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel_size),
    )


@pytest.mark.parametrize("available", [pytest.param(True, marks=stock_has_none), False])
def test_only_layers_that_can_take_the_masked_path_register(available, monkeypatch):
    # On SM90 with the opt-in it would change vLLM's table for the tests to come.
    monkeypatch.setattr(
        sparse_mla_attention, "install_sm90_thresholds", lambda: None, raising=False
    )
    cls = sparse_mla_attention.SparseMLACommonImpl
    registry = JitWarmupRegistry(vllm_config())
    with registry.activate():
        for _ in range(3):  # layers of one model
            impl = cls.__new__(cls)
            impl.masked_mha_available = available
            impl.process_weights_after_loading(torch.bfloat16)
    assert len(registry) == (2 if available else 0)
    if available:
        assert set(registry._registrations) == kernels()


@stock_has_none
def test_without_a_registry_nothing_is_compiled(monkeypatch):
    kernel = warmup_module().FA4_MASKED_MHA_KERNEL
    monkeypatch.setattr(kernel, "compile", lambda key: pytest.fail("compiled"))
    warmup_module().register_masked_mha_warmup()


@stock_has_none
def test_every_call_that_the_layer_makes_is_warmed_up(make_world):
    world = make_world([300] * 2)
    spans = [(0, 64, 100), (1, 256, 290)]
    words = world.whole_mask_words(spans, fits=False)
    for step in (
        world.step([(0, 0, 40), (1, 0, 90)]),
        world.step(spans, chunk_rows=96),
        world.step(spans, chunk_rows=96, mask_words=words),
    ):
        world.run(step)
    module = warmup_module()
    made = {
        module.MaskedCall(
            offset=call.callback == "offset_dense_mask_mod",
            causal=call.causal,
            return_lse=call.return_lse,
        )
        for call in world.calls
    }
    # Key starts are an aux tensor of their own.
    assert all(
        call.num_aux_tensors == 1 + (call.callback == "offset_dense_mask_mod")
        for call in world.calls
    )
    assert made == set(module.MASKED_CALLS)


@stock_has_none
@pytest.mark.parametrize("tensor_parallel_size", [1, 8])
def test_a_key_for_each_call_with_the_heads_of_one_rank(tensor_parallel_size):
    module = warmup_module()
    config = vllm_config(tensor_parallel_size=tensor_parallel_size)
    keys = module.FA4_MASKED_MHA_KERNEL.get_warmup_keys(config)
    assert [key.call for key in keys] == list(module.MASKED_CALLS)
    assert {key.num_heads for key in keys} == {128 // tensor_parallel_size}
    assert {(k.qk_nope_head_dim, k.qk_rope_head_dim, k.v_head_dim) for k in keys} == {
        (128, 64, 128)
    }


@stock_has_none
@pytest.mark.parametrize(
    ("topk", "tiles"), [(64, {1, 2, 3}), (128, {2, 3}), (256, {3}), (2048, {3})]
)
def test_a_key_for_each_length_of_queries_that_fa4_tells_apart(topk, tiles):
    keys = warmup_module().FA4_MASKED_MHA_KERNEL.get_warmup_keys(vllm_config(topk=topk))
    assert len(keys) == len(tiles) * len(warmup_module().MASKED_CALLS)
    assert {key.query_tiles for key in keys} == tiles


def test_no_threshold_admits_short_queries_beside_a_context():
    tables = mla_attention._MASKED_MHA_THRESHOLDS
    for backends in tables.values():
        for pure, context in (r for b in backends.values() for r in b.values()):
            for _, min_query_len in pure if context is None else context:
                assert min_query_len > 256


@stock_has_none
def test_every_call_of_a_step_names_its_longest_query(make_world):
    """A context chunk of a short query alone compiles nothing of its own."""
    world = make_world([400, 300])
    step = world.step([(0, 64, 364), (1, 256, 258)], chunk_rows=64)
    chunks = step.metadata.prefill.chunked_context.chunks
    assert {chunk.max_query_len for chunk in chunks} == {300, 2}
    world.run(step)
    assert {call.max_seqlen_q for call in world.calls} == {300}


@stock_has_none
def test_no_key_names_a_length():
    for kernel in kernels():
        names = {field.name for field in dataclasses.fields(kernel.CompileKey)}
        assert not {name for name in names if "len" in name or "token" in name}
        keys = kernel.get_warmup_keys(vllm_config())
        assert 0 < len(keys) == len(set(keys)) <= 8


@stock_has_none
def test_the_builders_key_covers_every_build_of_the_layer(make_world, monkeypatch):
    """Whichever rows the layer builds masks from, whatever builds them here."""
    from vllm.model_executor.kernels.attention.dsa import topk_mask_cutedsl

    build = sparse_mla_attention.build_packed_topk_mask
    built = []

    def noted(topk, *args, **options):
        built.append(topk_mask_cutedsl.rows_are_vectorizable(topk))
        return build(topk, *args, **options)

    monkeypatch.setattr(sparse_mla_attention, "build_packed_topk_mask", noted)
    world = make_world([300, 300])
    spans = [(0, 256, 290), (1, 37, 90)]
    words = world.whole_mask_words(spans, fits=False)
    for step in (
        world.step([(0, 0, 40)], decodes=3),
        world.step(spans),
        world.step(spans, chunk_rows=96, mask_words=words),
    ):
        world.run(step)
    (builder,) = kernels() - {warmup_module().FA4_MASKED_MHA_KERNEL}
    (key,) = builder.get_warmup_keys(vllm_config(topk=world.dims.index_topk))
    assert len(built) > 4
    assert set(built) == {key.vectorized}

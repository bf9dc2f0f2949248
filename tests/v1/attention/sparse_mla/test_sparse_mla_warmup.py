# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is compiled at start-up, when, and what becomes of it if that fails.

``tests/codegen/test_warmup_keys.py`` asks FA4 itself which kernels these are.
"""

import dataclasses
import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.attention import (
    mla_attention,
    sparse_mla_attention,
)
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm_sparse_mla.testing import served

pytestmark = pytest.mark.stock_fails("stock warms nothing of the masked path up")

# Shaped as vLLM's, whose own table a layer of this process may have replaced.
TABLE = {
    (192, 128): {
        "FLASHMLA_SPARSE": {
            1: (((2048, 1536), (4096, 4096)), None),
            2: (((2048, 512),), None),
            8: (((2048, 512), (4096, 512), (16384, 2048)), None),
        },
        "FLASHINFER_MLA_SPARSE": {8: (((32768, 0),), ((8192, 64), (20480, 9000)))},
    },
    (256, 256): {"FLASHMLA_SPARSE": {1: (((8192, 0),), ())}},
}


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(mla_attention, "_MASKED_MHA_THRESHOLDS", TABLE)


def warmup_module():
    return importlib.import_module(
        "vllm.model_executor.layers.attention.sparse_mla_warmup"
    )


@pytest.fixture
def warmup(monkeypatch):
    """A new start-up, as of another process."""
    module = warmup_module()
    fresh = module.MaskedMHAWarmup()
    for holder in (module, sparse_mla_attention):
        monkeypatch.setattr(holder, "MASKED_MHA_WARMUP", fresh)
    return fresh


@pytest.fixture(autouse=True)
def concatenated(monkeypatch):
    """The programs for K that start-up asks to compile, and nothing compiles."""
    asked = []
    monkeypatch.setattr(concat_kernel(), "compile", asked.append)
    return asked


@pytest.fixture
def compiled(warmup, monkeypatch):
    """The kernels of masked MHA that start-up asks to compile; nothing compiles."""
    asked = []
    for kernel in kernels():
        monkeypatch.setattr(kernel, "compile", asked.append)
    return asked


def concat_kernel():
    name = "vllm.model_executor.kernels.attention.dsa.concat_mla_k"
    return importlib.import_module(name).CONCAT_MLA_K_KERNEL


def kernels():
    return warmup_module().masked_mha_kernels()


def load(config, monkeypatch):
    """Start a server as far as vLLM's JIT warm-up.

    Returns:
        Whether masked MHA is still available to each layer.
    """
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config, raising=True)
    registry = JitWarmupRegistry(config)
    with registry.activate():
        for layer in served.layers_of(config):
            layer.impl.process_weights_after_loading(torch.bfloat16)
    if config.kernel_config.enable_jit_warmup:
        registry.warmup()
    return [layer.impl.masked_mha_available for layer in served.layers_of(config)]


CAN = {
    "eight-ranks": {},
    "one-rank": dict(tensor_parallel_size=1),
    "glm-one-rank": dict(model="glm", tensor_parallel_size=1),
    "fa4-backend": dict(backend="FLASH_ATTN_MLA_SPARSE_FA4"),
    "small-steps": dict(max_num_batched_tokens=2048),
}
CANNOT = {
    "forced-mqa": dict(force_mqa=True),
    "decode-context-parallel": dict(dcp_world_size=2),
    "ranks-without-a-row": dict(tensor_parallel_size=16),
    "backend-without-a-row": dict(backend="FLASHINFER_MLA_SPARSE_SM90"),
    "model-without-a-row": dict(model="glm"),
    # Two ranks' row ends at the top-k.
    "row-up-to-the-top-k": dict(tensor_parallel_size=2),
    # One rank's row asks for prompts of 4096 tokens in one piece.
    "steps-too-small": dict(tensor_parallel_size=1, max_num_batched_tokens=2048),
    "sequences-too-short": dict(max_model_len=2048),
}


@pytest.mark.parametrize("eager", [False, True], ids=["jit-warm-up", "eager"])
@pytest.mark.parametrize("case", [*CAN, *CANNOT])
def test_only_what_can_take_masked_mha_compiles(compiled, monkeypatch, case, eager):
    options = (CAN | CANNOT)[case]
    config = served.server_config(
        num_layers=3,
        enforce_eager=eager,
        enable_jit_warmup=not eager,
        **options,
    )
    assert load(config, monkeypatch) == [case in CAN] * 3
    kinds = {type(key) for key in compiled}
    assert kinds == ({k.CompileKey for k in kernels()} if case in CAN else set())
    assert len(compiled) == len(set(compiled)) <= 64


@pytest.mark.parametrize("case", [*CAN, *CANNOT])
def test_a_mask_workspace_only_where_masks_are_built(compiled, monkeypatch, case):
    """The metadata builder, made after the layers, asks for the model's dimensions."""
    config = served.server_config(**(CAN | CANNOT)[case])
    load(config, monkeypatch)
    # What the builder asks decides alone: the device and its FA4 would do.
    monkeypatch.setattr(
        sparse_mla_attention,
        "current_platform",
        SimpleNamespace(is_device_capability_family=lambda family: family == 100),
    )
    monkeypatch.setattr(
        sparse_mla_attention, "get_flash_attn_version", lambda **kwargs: 4
    )
    available = sparse_mla_attention._is_masked_mha_available
    assert available(128, 512, 128, 64, 128, "auto") is (case in CAN)


def test_layers_are_available_while_the_model_is_built(monkeypatch):
    """Nothing is ruled out by layers that have not loaded yet."""
    config = served.server_config(force_mqa=True)
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
    assert not warmup_module().masked_mha_is_ruled_out()


@pytest.mark.parametrize("eager", [False, True], ids=["jit-warm-up", "eager"])
@pytest.mark.parametrize(
    ("options", "flashinfer", "expected"),
    [
        pytest.param({}, False, (16, 128, 64, 128), id="deepseek"),
        pytest.param(dict(model="glm"), False, (8, 192, 64, 256), id="glm"),
        pytest.param(dict(model="glm-flash"), False, None, id="no-rope-part"),
        pytest.param(dict(force_mqa=True), False, (16, 128, 64, 128), id="forced-mqa"),
        pytest.param({}, True, None, id="flashinfer"),
    ],
)
def test_the_program_for_k_is_compiled_at_start_up(
    concatenated, compiled, monkeypatch, options, flashinfer, expected, eager
):
    """Dense MHA takes it too."""
    config = served.server_config(
        num_layers=3, enforce_eager=eager, enable_jit_warmup=not eager, **options
    )
    for layer in served.layers_of(config):
        layer.impl._use_flashinfer_concat_mla_k = flashinfer
    load(config, monkeypatch)
    keys = {dataclasses.astuple(key) for key in concatenated}
    assert keys == ({(*expected, torch.bfloat16)} if expected else set())


def test_who_turns_warm_up_off_without_eager_mode_gets_none(compiled, monkeypatch):
    config = served.server_config(enable_jit_warmup=False)
    assert load(config, monkeypatch) == [True]
    assert not compiled


@pytest.mark.parametrize("eager", [False, True], ids=["default", "eager"])
def test_eager_mode_switches_vllms_warm_up_off(tmp_path, eager):
    """Which is why this project compiles at load then."""
    model = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        max_position_embeddings=64,
    )
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(tmp_path), skip_tokenizer_init=True, enforce_eager=eager
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    assert config.kernel_config.enable_jit_warmup is not eager


@pytest.mark.parametrize("eager", [False, True], ids=["jit-warm-up", "eager"])
@pytest.mark.parametrize("fails", [0, -1], ids=["first", "last"])
def test_a_kernel_that_does_not_compile_costs_the_masked_path(
    warmup, compiled, monkeypatch, fails, eager
):
    broken = kernels()[fails]
    attempts = []

    def fail(key):
        attempts.append(key)
        raise RuntimeError("no such target")

    monkeypatch.setattr(broken, "compile", fail)
    config = served.server_config(
        num_layers=3, enforce_eager=eager, enable_jit_warmup=not eager
    )
    (first, *_) = served.layers_of(config)
    assert served.takes_masked_mha(first, [4096], 4096)
    told = []
    monkeypatch.setattr(
        warmup_module().logger,
        "exception",
        lambda text, *args: told.append(text % args),
    )
    load(config, monkeypatch)
    assert len(attempts) == 1
    assert len(told) == 1 and "sparse MQA" in told[0]
    for layer in served.layers_of(config):
        assert not served.takes_masked_mha(layer, [4096], 4096)


def test_batches_of_more_requests_than_fa4s_kernels_take_run_sparse_mqa():
    config = served.server_config()
    (layer,) = served.layers_of(config)
    limit = warmup_module().MAX_MASKED_MHA_REQUESTS
    assert served.takes_masked_mha(layer, [512] * limit, 4096)
    assert not served.takes_masked_mha(layer, [512] * (limit + 1), 4096)


def test_without_a_registry_nothing_is_compiled(compiled):
    warmup_module().prepare_masked_mha(object())
    assert not compiled


def test_every_call_that_the_layer_makes_is_warmed_up(make_world):
    world = make_world([300] * 2)
    spans = [(0, 64, 100), (1, 256, 290)]
    made = {False: set(), True: set()}
    for step in (
        world.step([(0, 0, 40), (1, 0, 90)]),
        world.step(spans, chunk_rows=96),
        world.step(spans, chunk_rows=96, per_range=True),
    ):
        world.calls.clear()
        world.run(step)
        made[step.metadata.prefill.chunked_context is not None] |= {
            warmup_module().MaskedCall(
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
    expected = warmup_module().MASKED_CALLS
    for has_context, calls in made.items():
        assert calls == {c for c in expected if c.has_context is has_context}


@pytest.mark.parametrize("tensor_parallel_size", [1, 8])
def test_a_key_for_each_call_with_the_heads_of_one_rank(tensor_parallel_size):
    config = served.server_config(tensor_parallel_size=tensor_parallel_size)
    kernel, *_ = kernels()
    keys = kernel.get_warmup_keys(config)
    assert {key.num_heads for key in keys} == {128 // tensor_parallel_size}
    assert {(k.qk_nope_head_dim, k.qk_rope_head_dim, k.v_head_dim) for k in keys} == {
        (128, 64, 128)
    }
    assert 0 < len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("options", "pure", "context"),
    [
        pytest.param({}, [8192, 16384], [8192, 16384], id="long-queries-alone"),
        pytest.param(
            dict(topk=1024, backend="FLASHINFER_MLA_SPARSE"),
            [8192, 16384],
            # 64 queries are enough up to 8192 keys; no length class is left out.
            [128, 256, 8192, 16384],
            id="short-queries-beside-a-context",
        ),
        pytest.param(
            dict(topk=32, backend="FLASHINFER_MLA_SPARSE"),
            [128, 256, 8192, 16384],
            [128, 256, 8192, 16384],
            id="short-prompts-beyond-a-small-top-k",
        ),
        pytest.param(
            dict(backend="FLASHINFER_MLA_SPARSE", max_num_batched_tokens=8192),
            [8192],
            [128, 256, 8192],
            id="small-steps",
        ),
        pytest.param(dict(max_model_len=3000), [3000], [3000], id="short-sequences"),
        pytest.param(
            dict(model="glm", tensor_parallel_size=1), [8192], [], id="no-context"
        ),
        pytest.param(dict(tensor_parallel_size=1), [8192], [], id="one-length"),
        pytest.param(dict(force_mqa=True), [], [], id="forced-mqa"),
    ],
)
def test_the_lengths_of_queries_that_dispatch_admits(options, pure, context):
    config = served.server_config(**options)
    (layer,) = served.layers_of(config)
    query_lens = warmup_module().masked_mha_query_lens
    assert query_lens(layer, config, has_context=False) == pure
    assert query_lens(layer, config, has_context=True) == context


def test_every_call_of_a_step_names_its_longest_query(make_world):
    """A context chunk of a short query alone compiles nothing of its own."""
    world = make_world([400, 300])
    step = world.step([(0, 64, 364), (1, 256, 258)], chunk_rows=64)
    chunks = step.metadata.prefill.chunked_context.chunks
    assert {chunk.max_query_len for chunk in chunks} == {300, 2}
    world.run(step)
    assert {call.max_seqlen_q for call in world.calls} == {300}


def test_no_key_of_the_builder_names_a_length():
    _, builder = kernels()
    names = {field.name for field in dataclasses.fields(builder.CompileKey)}
    assert not {name for name in names if "len" in name or "token" in name}


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
    for step in (
        world.step([(0, 0, 40)], decodes=3),
        world.step(spans),
        world.step(spans, chunk_rows=96, per_range=True),
    ):
        world.run(step)
    _, builder = kernels()
    (key,) = builder.get_warmup_keys(served.server_config(topk=world.dims.index_topk))
    assert len(built) > 4
    assert set(built) == {key.vectorized}

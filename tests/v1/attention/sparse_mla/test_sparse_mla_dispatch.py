# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where masked MHA is available, on which models, and who has the last word."""

import dataclasses
import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

import vllm.envs as envs
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm_sparse_mla.testing import layer, served
from vllm_sparse_mla.testing.layer import Dims

NO_OPT_IN = "stock has no opt-in for SM90"
MODULES = "vllm.model_executor.layers.attention."

# As dispatch asks for them, without the top-k.
MODELS = {name: dataclasses.astuple(d)[:5] for name, d in layer.MODELS.items()}
DEEPSEEK, GLM, GLM_FLASH = MODELS.values()

DEVICES = (
    *("sm80", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"),
    *("rocm", "cpu"),
)


def available(dims, kv_cache_dtype="auto"):
    return sparse_mla_attention._is_masked_mha_available(*dims, kv_cache_dtype)


@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", DEVICES)
def test_devices_without_the_opt_in(on_device, name, dims):
    on_device(name)
    assert available(dims) is (name in ("sm100", "sm103"))


@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "name",
    [pytest.param("sm90", marks=pytest.mark.stock_fails(NO_OPT_IN))]
    + [name for name in DEVICES if name != "sm90"],
)
def test_devices_with_the_opt_in(on_device, name, dims):
    on_device(name, "1")
    enabled = getattr(sparse_mla_attention, "sm90_masked_mha_enabled", bool)
    assert enabled() is (name == "sm90")
    assert available(dims) is (name in ("sm90", "sm100", "sm103"))


@pytest.fixture
def opt_in():
    """The opt-in's module, which stock lacks."""
    return importlib.import_module(MODULES + "sparse_mla_sm90")


ON, OFF = ("1", "true"), ("0", "")


@pytest.mark.parametrize(
    "switch",
    [*(pytest.param(x, marks=pytest.mark.stock_fails(NO_OPT_IN)) for x in ON), *OFF],
)
def test_values_of_the_switch(on_device, switch):
    on_device("sm90", switch)
    assert available(DEEPSEEK) is (switch in ON)


@pytest.mark.stock_fails(NO_OPT_IN)
@pytest.mark.parametrize(
    "fa4_mask",
    [SimpleNamespace(AttentionMask=SimpleNamespace()), None],
    ids=["stock", "none"],
)
def test_without_the_packed_branch_the_switch_warns_and_does_nothing(
    on_device, opt_in, monkeypatch, fa4_mask
):
    """FA4 may be unpatched, or the switch set when its module was loaded already."""
    on_device("sm90", "1", fa4_mask=fa4_mask)
    warned = []
    monkeypatch.setattr(
        opt_in.logger, "warning", lambda msg, *args: warned.append(msg % args)
    )
    assert not opt_in.sm90_masked_mha_enabled()
    assert not available(DEEPSEEK)
    (line,) = warned
    assert "masked MHA stays off" in line


@pytest.mark.stock_fails(NO_OPT_IN)
@pytest.mark.parametrize(("first", "then"), [("1", "0"), ("0", "1")])
def test_the_switch_is_read_once(on_device, opt_in, monkeypatch, first, then):
    on_device("sm90", first)
    assert opt_in.sm90_masked_mha_enabled() is (first == "1")
    monkeypatch.setenv("VLLM_SPARSE_MLA_SM90", then)
    assert opt_in.sm90_masked_mha_enabled() is (first == "1")


NEAR_MISSES = {
    "heads-of-one-rank": (16, 512, 128, 64, 128),
    "more-heads": (256, 512, 128, 64, 128),
    "glm-with-deepseeks-heads": (128, 512, 192, 64, 256),
    "deepseek-with-glms-heads": (64, 512, 128, 64, 128),
    "lora-rank": (128, 256, 128, 64, 128),
    "nope": (128, 512, 192, 64, 128),
    "rope": (128, 512, 128, 32, 128),
    "no-rope": (128, 512, 128, 0, 128),
    "v": (128, 512, 128, 64, 256),
    "flash-with-rope": (64, 512, 256, 64, 256),
}


@pytest.mark.parametrize("switch", [None, "1"], ids=["default", "opt-in"])
@pytest.mark.parametrize("dims", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_models_that_nearly_fit(on_device, dims, switch):
    on_device("sm90" if switch else "sm100", switch)
    assert not available(dims)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
def test_heads_are_counted_over_all_ranks(
    on_device, dims, tensor_parallel_size, monkeypatch
):
    """The layer multiplies its own heads by the tensor parallel size."""
    on_device("sm100")
    cls = sparse_mla_attention.SparseMLACommonImpl
    monkeypatch.setitem(
        cls.__init__.__globals__,
        "get_tensor_model_parallel_world_size",
        lambda: tensor_parallel_size,
    )
    heads, rank, nope, rope, v = dims
    for num_heads, expected in (
        (heads // tensor_parallel_size, True),
        (heads, tensor_parallel_size == 1),
    ):
        of_a_rank = Dims(num_heads, rank, nope, rope, v)
        impl = cls(**of_a_rank.layer_arguments(), kv_b_proj=None)
        assert impl.masked_mha_available is expected


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
def test_only_fa4_on_sm100(on_device, dims, version):
    on_device("sm100", fa_version=version)
    assert available(dims) is (version == 4)


@pytest.mark.stock_fails(NO_OPT_IN)
def test_the_opt_in_asks_whether_fa4_runs_not_what_vllm_prefers(on_device):
    on_device("sm90", "1", fa4=True)
    assert available(DEEPSEEK)
    on_device("sm90", "1", fa4=False)
    assert not available(DEEPSEEK)


UNQUANTIZED = ("auto", "bfloat16", "float16")
READ_WITH_THE_OPT_IN = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
NEVER_READ = ("nvfp4_ds_mla", "nvfp4", "fp8_per_token_head", "turboquant_k8v4")
KV_CACHE_DTYPES = UNQUANTIZED + READ_WITH_THE_OPT_IN + NEVER_READ
BLACKWELL = ("sm100", "sm103")


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("name", BLACKWELL)
def test_kv_cache_dtypes(on_device, name, kv_cache_dtype):
    on_device(name)
    assert available(DEEPSEEK, kv_cache_dtype) is (kv_cache_dtype in UNQUANTIZED)


AS_IN_STOCK = (
    *itertools.product(("sm90",), NEVER_READ),
    *itertools.product(BLACKWELL, UNQUANTIZED + NEVER_READ),
)
BY_OPT_IN = (
    *itertools.product(("sm90",), UNQUANTIZED + READ_WITH_THE_OPT_IN),
    *itertools.product(BLACKWELL, READ_WITH_THE_OPT_IN),
)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        *AS_IN_STOCK,
        *(
            pytest.param(*case, marks=pytest.mark.stock_fails(NO_OPT_IN))
            for case in BY_OPT_IN
        ),
    ],
)
def test_kv_cache_dtypes_with_the_opt_in(on_device, name, kv_cache_dtype, monkeypatch):
    """On SM90 the one switch covers quantized caches, on SM100 it takes another."""
    on_device(name, "1" if name == "sm90" else None)
    if name != "sm90":
        switch = "VLLM_SPARSE_MLA_QUANTIZED_KV"
        monkeypatch.setitem(envs.environment_variables, switch, lambda: True)
    read = kv_cache_dtype not in NEVER_READ
    assert available(DEEPSEEK, kv_cache_dtype) is read


@pytest.mark.stock_fails(NO_OPT_IN)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_rows_of_fp8_ds_mla_have_a_rope_part(on_device, kv_cache_dtype):
    on_device("sm90", "1")
    assert available(GLM, kv_cache_dtype)
    assert available(GLM_FLASH, kv_cache_dtype) is (kv_cache_dtype != "fp8_ds_mla")


@pytest.mark.stock_fails("stock logs nothing")
@pytest.mark.parametrize(
    ("kv_cache_dtype", "reason"),
    [
        ("fp8_e4m3", "VLLM_SPARSE_MLA_QUANTIZED_KV=1"),
        ("nvfp4_ds_mla", "later chunks of a context cannot be fetched"),
        ("int8_per_token_head", "no gather for int8_per_token_head"),
    ],
)
def test_a_server_where_only_the_cache_refuses_says_why(
    on_device, kv_cache_dtype, reason, monkeypatch
):
    said = []
    monkeypatch.setattr(
        importlib.import_module(MODULES + "sparse_mla_kv_cache").logger,
        "info_once",
        lambda message, *args: said.append(message % args),
        raising=False,
    )
    on_device("sm90")
    assert not available(DEEPSEEK, kv_cache_dtype)
    on_device("sm100")
    assert not available((16, *DEEPSEEK[1:]), kv_cache_dtype)
    assert said == []
    assert not available(DEEPSEEK, kv_cache_dtype)
    assert len(said) == 1 and reason in said[0]


@pytest.fixture
def dispatched(monkeypatch):
    """A layer that vLLM's table lets take masked MHA for prompts of 4096 tokens."""
    # Upstream's own row, which the opt-in may have replaced in this process.
    ranges = {1: (((2048, 1536), (4096, 4096)), None)}
    table = {(192, 128): {"FLASHMLA_SPARSE": ranges}}
    monkeypatch.setattr(mla_attention, "_MASKED_MHA_THRESHOLDS", table)
    config = served.server_config(tensor_parallel_size=1)
    (layer,) = served.layers_of(config)
    return layer


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, True, id="taken"),
        pytest.param({"sparse_mla_force_mqa": True}, False, id="force-mqa-wins"),
        pytest.param({"masked_mha_available": False}, False, id="not-available"),
        pytest.param({"prefill_backend": None}, False, id="no-prefill-backend"),
        pytest.param({"hisparse_cache": object()}, False, id="host-backed-cache"),
    ],
)
def test_upstreams_layer_decides(dispatched, change, expected):
    holders = (dispatched, dispatched.impl, dispatched._vllm_config.attention_config)
    for name, value in change.items():
        (holder,) = (holder for holder in holders if name in vars(holder))
        vars(holder)[name] = value
    assert served.takes_masked_mha(dispatched, [4096], 4096) is expected


@pytest.mark.parametrize(
    "mask_words",
    [
        pytest.param(None, id="none"),
        pytest.param(4, id="too-small"),
        pytest.param(1 << 25, id="enough"),
    ],
)
@pytest.mark.parametrize("layer_may", [True, False])
def test_layer_and_builders_workspace_may_differ(dispatched, layer_may, mask_words):
    """Layers left out by ``--kv-cache-dtype-skip-layers`` have a dtype of their own."""
    dispatched.impl.masked_mha_available = layer_may
    metadata = served.step_metadata([4096], [0], mask_words=mask_words)
    expected = layer_may and mask_words == 1 << 25
    assert dispatched._use_sparse_mha(metadata) is expected


BACKENDS = {
    "flashmla_sparse": "FlashMLASparseImpl",
    "flashinfer_mla_sparse": "FlashInferMLASparseImpl",
    "flashinfer_mla_sparse_sm120": "FlashInferMLASparseSM120Impl",
    "rocm_aiter_mla_sparse": "ROCMAiterMLASparseImpl",
    "xpu_mla_sparse": "XPUMLASparseImpl",
}


@pytest.mark.parametrize("name", BACKENDS)
def test_other_backends_import_and_find_what_they_read(name):
    module = importlib.import_module(f"vllm.v1.attention.backends.mla.{name}")
    implementation = getattr(module, BACKENDS[name])
    for attribute in ("topk_indices_buffer", "init_topk_indices_buffer", "forward_mqa"):
        assert hasattr(implementation, attribute)
    # What upstream takes from the replaced module is one object, however reached.
    for attribute in vars(sparse_mla_attention):
        if attribute.startswith(("SparseMLA", "SharedTopk")) and hasattr(
            module, attribute
        ):
            own = getattr(module, attribute)
            assert own is getattr(sparse_mla_attention, attribute)


@pytest.mark.parametrize("name", ["flashmla_sparse", "flashinfer_mla_sparse"])
def test_backends_of_sparse_mla_inherit_the_masked_path(name):
    module = importlib.import_module(f"vllm.v1.attention.backends.mla.{name}")
    implementation = getattr(module, BACKENDS[name])
    common = sparse_mla_attention.SparseMLACommonImpl
    assert issubclass(implementation, common)
    assert implementation.forward_mha is common.forward_mha
    assert implementation._run_masked_mha is common._run_masked_mha


def test_a_backend_that_turns_masked_mha_off_registers_nothing(monkeypatch):
    """ROCm's sets ``masked_mha_available`` to False after construction."""
    cls = sparse_mla_attention.SparseMLACommonImpl
    impl = cls.__new__(cls)
    impl.masked_mha_available = False
    impl._use_flashinfer_concat_mla_k = True
    monkeypatch.setattr(
        sparse_mla_attention,
        "prepare_masked_mha",
        lambda impl: pytest.fail("registered"),
        raising=False,
    )
    impl.process_weights_after_loading(torch.bfloat16)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantized KV caches: what is refused, and up to which lengths the others serve."""

import copy
import inspect
import logging

import pytest
import torch

from vllm import _custom_ops
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

kv_cache = pytest.importorskip(
    "vllm.model_executor.layers.attention.sparse_mla_kv_cache"
)

FLAT = ("fp8", "fp8_e4m3", "fp8_e5m2")
SCALE = torch.ones(1)
TABLE = {
    (192, 128): {
        "FLASHMLA_SPARSE": {1: (((2048, 1536), (4096, 4096)), None)},
        "FLASHINFER_MLA_SPARSE": {8: (((2048, 512), (32768, 16384)), None)},
    },
    (256, 256): {"FLASHMLA_SPARSE": {1: (((8192, 0),), ()), 2: (((20480, 0),), None)}},
}
HALVED = {
    (192, 128): {
        "FLASHMLA_SPARSE": {1: (((1024, 1536), (2048, 4096)), None)},
        "FLASHINFER_MLA_SPARSE": {8: (((1024, 512), (16384, 16384)), None)},
    },
    (256, 256): {"FLASHMLA_SPARSE": {1: (((4096, 0),), ()), 2: (((10240, 0),), None)}},
}


def check(
    dtype="auto", shape=(3, 16, 576), element=torch.bfloat16, scale=SCALE, rope=64
):
    cache = torch.empty(shape, dtype=element)
    kv_cache.check_kv_cache(cache, dtype, 512, rope, scale)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(),
        dict(dtype="bfloat16", scale=None),
        dict(dtype="auto", shape=(3, 16, 512), rope=0),
        dict(dtype="fp8_ds_mla", shape=(3, 64, 656), element=torch.uint8, scale=None),
        *(dict(dtype=name, element=torch.float8_e4m3fn) for name in FLAT),
        dict(dtype="fp8", element=torch.uint8, shape=(3, 16, 512), rope=0),
    ],
    ids=str,
)
def test_caches_that_can_be_read(kwargs):
    check(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(dtype="bogus"), "'bogus'"),
        (dict(dtype="nvfp4_ds_mla", shape=(3, 64, 352)), "'nvfp4_ds_mla'"),
        (dict(shape=(3, 16, 512)), "rows of 576 entries of 2 bytes, got 512"),
        (dict(element=torch.uint8), "576 entries of 2 bytes, got 576 of 1"),
        (dict(dtype="fp8"), "576 entries of 1 bytes, got 576 of 2"),
        (dict(dtype="fp8_ds_mla", element=torch.uint8), "rows of 656 .* got 576"),
        (dict(dtype="fp8_ds_mla", rope=0), "512 and 64 for an fp8_ds_mla"),
        (dict(dtype="fp8", element=torch.uint8, scale=None), "k_scale .* got None"),
        (dict(dtype="fp8", element=torch.uint8, scale=torch.ones(2)), "k_scale"),
        (dict(dtype="fp8_e5m2", scale=torch.ones(1).half()), "k_scale .*float16"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_caches_that_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        check(**kwargs)


@pytest.mark.parametrize("kv_cache_dtype", ["bogus", "fp8_e4m3"])
def test_the_layer_refuses_before_any_launch(make_world, kv_cache_dtype):
    """The cache is one of bfloat16 rows."""
    world = make_world([300])
    world.impl.kv_cache_dtype = kv_cache_dtype
    step = world.step([(0, 64, 130)])
    with pytest.raises(ValueError, match=kv_cache_dtype):
        world.run(step)
    assert world.calls == []
    assert (step.mask.words == -1).all(), "a mask was built"


def test_lengths_are_halved_and_nothing_else():
    table = copy.deepcopy(TABLE)
    assert kv_cache.halve_lengths(table) == HALVED
    assert table == TABLE


def test_halved_lengths_are_installed_once_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(mla_attention, "_MASKED_MHA_THRESHOLDS", copy.deepcopy(TABLE))
    monkeypatch.setattr(kv_cache.logger, "propagate", True)
    caplog.set_level(logging.INFO)
    kv_cache.install_quantized_kv_thresholds.cache_clear()
    for _ in range(3):
        kv_cache.install_quantized_kv_thresholds()
    kv_cache.install_quantized_kv_thresholds.cache_clear()
    assert mla_attention._MASKED_MHA_THRESHOLDS == HALVED
    [message] = [r.getMessage() for r in caplog.records if "QUANTIZED_KV" in r.msg]
    assert "not measured on SM100" in message


@pytest.mark.parametrize(
    ("device", "kv_cache_dtype", "expected"),
    [
        ("sm100", "auto", []),
        ("sm100", "fp8", ["halved"]),
        ("sm100", "fp8_ds_mla", ["halved"]),
        ("sm90", "fp8_ds_mla", []),
    ],
)
def test_which_thresholds_a_loaded_layer_installs(
    on_device, monkeypatch, device, kv_cache_dtype, expected
):
    """Under the Hopper opt-in SM90 has an estimate, of quantized caches too."""
    on_device(device, "1")
    installed = []
    for name, value in (
        ("install_quantized_kv_thresholds", lambda: installed.append("halved")),
        ("prepare_masked_mha", lambda impl: True),
    ):
        monkeypatch.setattr(sparse_mla_attention, name, value)
    impl = object.__new__(sparse_mla_attention.SparseMLACommonImpl)
    impl.kv_cache_dtype, impl.masked_mha_available = kv_cache_dtype, True
    impl._use_flashinfer_concat_mla_k = True
    impl.process_weights_after_loading(torch.bfloat16)
    assert installed == expected


def test_dense_mha_over_nvfp4_reaches_a_gather_that_does_not_know_it(make_world):
    """Upstream's path for a cached prefix: why masked MHA refuses the format.

    The gather that knows it has no argument for where a chunk begins.
    """
    knows_it = inspect.signature(_custom_ops.cp_gather_and_upconvert_nvfp4_kv_cache)
    assert "seq_starts" not in knows_it.parameters
    world = make_world([300])
    world.impl.kv_cache_dtype = "nvfp4_ds_mla"
    step = world.step([(0, 8, 20)])
    step.metadata.prefill.prefill_backend = object()
    with (
        world.device_calls(),
        pytest.raises((ValueError, RuntimeError), match="nvfp4_ds_mla"),
    ):
        MLACommonBaseImpl._compute_prefill_context(
            world.impl, step.q, world.cache, step.metadata, world.k_scale
        )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hopper is an explicit opt-in: without the switch nothing changes.

Contract: ``VLLM_SPARSE_MLA_SM90=1`` on SM90, and nothing else, turns masked MHA on
there. The device is faked.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.attention import sparse_mla_attention

try:
    from vllm.model_executor.layers.attention import sparse_mla_sm90
except ImportError:  # stock: every test here fails, as marked
    sparse_mla_sm90 = None

pytestmark = pytest.mark.stock_fails("stock has no opt-in for SM90")

SWITCH = "VLLM_SPARSE_MLA_SM90"
UNPACKED = SimpleNamespace(AttentionMask=SimpleNamespace())
DEEPSEEK_DIMS = (128, 512, 128, 64, 128)
GLM_DIMS = (64, 512, 192, 64, 256)


@pytest.mark.parametrize(
    "family, switch, enabled",
    [
        pytest.param(90, "1", True, id="opted-in"),
        pytest.param(90, "true", True, id="true"),
        pytest.param(90, None, False, id="unset"),
        pytest.param(90, "0", False, id="off"),
        pytest.param(90, "", False, id="empty"),
        pytest.param(100, "1", False, id="sm100"),
        pytest.param(120, "1", False, id="sm120"),
        pytest.param(80, "1", False, id="sm80"),
    ],
)
def test_only_the_switch_on_sm90_changes_anything(on_device, family, switch, enabled):
    on_device(family, switch)

    assert sparse_mla_sm90.sm90_masked_mha_enabled() is enabled
    available = sparse_mla_attention._is_masked_mha_available(*DEEPSEEK_DIMS, "auto")
    assert available is (enabled or family == 100)


@pytest.mark.parametrize("fa4_mask", [UNPACKED, None], ids=["stock", "none"])
def test_without_the_packed_branch_the_switch_warns_and_does_nothing(
    on_device, monkeypatch, fa4_mask
):
    """FA4 may be unpatched, or the switch set when its module was loaded already."""
    on_device(90, "1", fa4_mask)
    warned = []
    monkeypatch.setattr(
        sparse_mla_sm90.logger, "warning", lambda msg, *args: warned.append(msg % args)
    )
    assert not sparse_mla_sm90.sm90_masked_mha_enabled()
    assert not sparse_mla_attention._is_masked_mha_available(*DEEPSEEK_DIMS, "auto")
    (line,) = warned
    assert "masked MHA stays off" in line


@pytest.mark.parametrize(("family", "expected"), [(90, []), (100, ["halved"])])
def test_quantized_caches_halve_vllms_lengths_but_on_sm90(
    on_device, monkeypatch, family, expected
):
    on_device(family, "1")
    installed = []
    for name, value in (
        ("install_quantized_kv_thresholds", lambda: installed.append("halved")),
        ("prepare_masked_mha", lambda impl: True),
    ):
        monkeypatch.setattr(sparse_mla_attention, name, value)
    impl = object.__new__(sparse_mla_attention.SparseMLACommonImpl)
    impl.kv_cache_dtype, impl.masked_mha_available = "fp8_ds_mla", True
    impl._use_flashinfer_concat_mla_k = True
    impl.process_weights_after_loading(torch.bfloat16)
    assert installed == expected


@pytest.mark.parametrize(("first", "then"), [("1", "0"), ("0", "1")])
def test_the_switch_is_read_once(on_device, monkeypatch, first, then):
    on_device(90, first)
    assert sparse_mla_sm90.sm90_masked_mha_enabled() is (first == "1")
    monkeypatch.setenv(SWITCH, then)
    assert sparse_mla_sm90.sm90_masked_mha_enabled() is (first == "1")


def test_the_opt_in_keeps_upstreams_other_conditions(on_device):
    on_device(90, "1")
    available = sparse_mla_attention._is_masked_mha_available
    assert available(*GLM_DIMS, "bfloat16")
    assert not available(*GLM_DIMS, "nvfp4_ds_mla")
    assert not available(16, *DEEPSEEK_DIMS[1:], "auto")

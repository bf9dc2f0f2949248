# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hopper is an explicit opt-in: without the switch nothing changes.

Contract: ``VLLM_SPARSE_MLA_SM90=1`` on SM90, and nothing else, turns masked MHA on
there and replaces vLLM's table of prefill thresholds. The device is faked.
"""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention

try:
    from vllm.model_executor.layers.attention import sparse_mla_sm90
except ImportError:  # stock: every test here fails, as marked
    sparse_mla_sm90 = None

pytestmark = pytest.mark.stock_fails("stock has no opt-in for SM90")

SWITCH = "VLLM_SPARSE_MLA_SM90"
FA4_MASK_MODULE = "vllm.vllm_flash_attn.cute.mask"
PACKED = SimpleNamespace(packed_mask_front=None)
UNPACKED = SimpleNamespace()
DEEPSEEK_DIMS = (128, 512, 128, 64, 128)
GLM_DIMS = (64, 512, 192, 64, 256)


# Shaped as vLLM's, whose own table a layer of this process may have replaced.
SM100_TABLE = {
    (192, 128): {
        "FLASHMLA_SPARSE": {1: (((2048, 512), (4096, 1024)), None)},
        "FLASHINFER_MLA_SPARSE": {8: (((2048, 512),), None)},
    },
    (256, 256): {"FLASHMLA_SPARSE": {1: (((8192, 0),), ())}},
    (320, 128): {"FLASHMLA_SPARSE": {1: (((1024, 0),), ())}},
}


@pytest.fixture
def on_device(monkeypatch):
    """Return a function that fakes the device's family, the switch and FA4's branch."""
    monkeypatch.setattr(
        mla_attention, "_MASKED_MHA_THRESHOLDS", copy.deepcopy(SM100_TABLE)
    )
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", int)

    def fake(family: int, switch: str | None, fa4_mask=PACKED) -> None:
        sparse_mla_sm90._opted_in.cache_clear()
        monkeypatch.setitem(sys.modules, FA4_MASK_MODULE, fa4_mask)
        platform = SimpleNamespace(is_device_capability_family=lambda f: f == family)
        for module in (sparse_mla_sm90, sparse_mla_attention):
            monkeypatch.setattr(module, "current_platform", platform)
        monkeypatch.setattr(sparse_mla_attention, "is_fa_version_supported", bool)
        # What vLLM's selector says: FA3 on SM90, FA4 on SM100.
        monkeypatch.setattr(
            sparse_mla_attention,
            "get_flash_attn_version",
            lambda **_: 4 if family == 100 else 3,
        )
        if switch is None:
            monkeypatch.delenv(SWITCH, raising=False)
        else:
            monkeypatch.setenv(SWITCH, switch)

    yield fake
    sparse_mla_sm90._opted_in.cache_clear()


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

    sparse_mla_sm90.install_sm90_thresholds()

    assert sparse_mla_sm90.sm90_masked_mha_enabled() is enabled
    changed = mla_attention._MASKED_MHA_THRESHOLDS != SM100_TABLE
    assert changed is enabled
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
    sparse_mla_sm90.install_sm90_thresholds()
    assert not sparse_mla_sm90.sm90_masked_mha_enabled()
    assert not sparse_mla_attention._is_masked_mha_available(*DEEPSEEK_DIMS, "auto")
    assert mla_attention._MASKED_MHA_THRESHOLDS == SM100_TABLE
    (line,) = warned
    assert "masked MHA stays off" in line


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


@pytest.mark.parametrize("offset", [False, True], ids=["dense", "offset"])
@pytest.mark.parametrize(
    ("family", "switch", "has_front"),
    [(90, "1", True), (90, None, False), (100, "1", False)],
    ids=["opted-in", "unset", "sm100"],
)
def test_fa4_takes_the_front_of_a_callback_on_sm90_alone(
    on_device, monkeypatch, family, switch, has_front, offset
):
    from vllm.model_executor.layers.attention import sparse_mla_mask

    on_device(family, switch)
    module = SimpleNamespace(packed_mask_front=lambda mask_mod: ("front", mask_mod))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.cute.mask", module)
    name = "offset_dense_mask_mod" if offset else "dense_mask_mod"
    plain = getattr(sparse_mla_mask, name)
    expected = ("front", plain) if has_front else plain
    assert sparse_mla_mask.mask_mod_for(offset) == expected


def test_no_row_measured_on_sm100_is_left(on_device):
    on_device(90, "1")
    sparse_mla_sm90.install_sm90_thresholds()
    sparse_mla_sm90.install_sm90_thresholds()
    table = mla_attention._MASKED_MHA_THRESHOLDS
    assert table == sparse_mla_sm90.SM90_MASKED_MHA_THRESHOLDS
    assert set(table) == {(192, 128), (256, 256)}
    for backends in table.values():
        assert set(backends) == {"FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"}
        assert all(set(sizes) == {1, 2, 4, 8} for sizes in backends.values())


@pytest.mark.parametrize("switch", ["1", None], ids=["opted-in", "default"])
def test_a_layer_that_is_loaded_installs_them(on_device, monkeypatch, switch):
    on_device(90, switch)
    monkeypatch.setattr(sparse_mla_attention, "prepare_masked_mha", bool)
    cls = sparse_mla_attention.SparseMLACommonImpl
    impl = cls.__new__(cls)
    impl.masked_mha_available = True
    impl.kv_cache_dtype = "auto"
    impl.process_weights_after_loading(torch.bfloat16)
    expected = sparse_mla_sm90.SM90_MASKED_MHA_THRESHOLDS if switch else SM100_TABLE
    assert expected == mla_attention._MASKED_MHA_THRESHOLDS


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", ["FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_thresholds_decide_through_upstreams_function(on_device, dims, backend, size):
    on_device(90, "1")
    sparse_mla_sm90.install_sm90_thresholds()
    pure, context = sparse_mla_sm90.SM90_MASKED_MHA_THRESHOLDS[dims][backend][size]

    def use(query_len: int, seq_len: int, has_context: bool) -> bool:
        return mla_attention._use_masked_mha(
            backend_name=backend,
            tensor_parallel_size=size,
            qk_head_dim=dims[0],
            v_head_dim=dims[1],
            query_len=query_len,
            seq_len=seq_len,
            has_context=has_context,
        )

    for ranges, has_context in ((pure, False), (context, True)):
        if ranges is None:
            ranges = pure
        assert list(ranges) == sorted(ranges), "lengths must ascend"
        for max_len, min_query in ranges:
            assert use(max(min_query, 1), max_len, has_context)
            assert min_query <= 1 or not use(min_query - 1, max_len, has_context)
        longest = ranges[-1][0] if ranges else 0
        assert not use(longest + 1, longest + 1, has_context)


def test_a_log_line_names_the_lengths(on_device, monkeypatch):
    on_device(90, "1")
    monkeypatch.setattr(
        "vllm.distributed.get_tensor_model_parallel_world_size", lambda: 8
    )
    line = sparse_mla_sm90.describe_sm90_thresholds(8)
    seen = []
    monkeypatch.setattr(
        sparse_mla_sm90.logger, "info_once", lambda msg, *args: seen.append(msg % args)
    )
    sparse_mla_sm90.install_sm90_thresholds()
    assert len(seen) == 1 and seen[0].endswith(line)
    longest = sparse_mla_sm90.SM90_MASKED_MHA_THRESHOLDS[192, 128][
        "FLASH_ATTN_MLA_SPARSE"
    ][8][0][-1][0]
    assert f"FLASH_ATTN_MLA_SPARSE at 192/128: to {longest} tokens" in line
    assert "nothing at tensor parallel size 3" in (
        sparse_mla_sm90.describe_sm90_thresholds(3)
    )

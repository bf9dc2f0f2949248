# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hopper is an explicit opt-in: without the switch nothing changes.

Contract: ``VLLM_SPARSE_MLA_SM90=1`` on SM90, and nothing else, turns masked MHA on
there; the estimate decides in place of vLLM's table. The device is faked.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention

try:
    from vllm.model_executor.layers.attention import sparse_mla_sm90
    from vllm.model_executor.layers.attention.sparse_mla_estimate import (
        PrefillEstimate,
        last_parts,
        make_estimate,
        whole_prompts,
    )
    from vllm.model_executor.layers.attention.sparse_mla_h200 import COSTS
except ImportError:  # stock: every test here fails, as marked
    sparse_mla_sm90 = None

from vllm_sparse_mla.testing import served

pytestmark = pytest.mark.stock_fails("stock has no opt-in for SM90")

SWITCH = "VLLM_SPARSE_MLA_SM90"
FA4_MASK_MODULE = "vllm.vllm_flash_attn.cute.mask"
PACKED = SimpleNamespace(AttentionMask=SimpleNamespace(apply_mask_mod_sm90_vector=None))
UNPACKED = SimpleNamespace(AttentionMask=SimpleNamespace())
DEEPSEEK_DIMS = (128, 512, 128, 64, 128)
GLM_DIMS = (64, 512, 192, 64, 256)


@pytest.fixture
def on_device(monkeypatch):
    """Return a function that fakes the device's family, the switch and FA4's branch."""

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


@pytest.fixture
def long_batch():
    """One new prompt beside continuations over a long context."""
    return make_metadata([16, 16, 4096], [14000, 14000, 0])


def make_metadata(query_lens, context_lens, topk=2048):
    context = None
    if any(context_lens):
        context = SimpleNamespace(
            context_lens_list=context_lens, chunks=[SimpleNamespace(max_seq_len=1)]
        )
    prefill = SimpleNamespace(
        query_lens_cpu=torch.tensor(query_lens),
        max_query_len=max(query_lens),
        chunked_context=context,
        use_dense_mha=False,
        topk_mask_workspace=torch.empty(1 << 40, dtype=torch.int32, device="meta"),
    )
    longest = max(map(sum, zip(query_lens, context_lens)))
    return SimpleNamespace(
        prefill=prefill, prefill_max_seq_len=longest, topk_tokens=topk
    )


def make_layer(**options):
    (layer,) = served.layers_of(served.server_config(**options))
    return layer


@pytest.mark.parametrize("backend", ["FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"])
@pytest.mark.parametrize("model", ["deepseek", "glm"])
@pytest.mark.parametrize("size", [1, 2, 8, 16])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([2500], [0]),
        ([16384], [0]),
        ([4096], [4096]),
        ([4096], [60000]),
        ([16] * 30 + [4096], [14000] * 30 + [0]),
        ([256] * 16, [8192] * 16),
    ],
    ids=["short", "long", "chunk", "late-chunk", "continuations", "suffixes"],
)
def test_the_shorter_estimate_decides(
    on_device, model, backend, size, query_lens, context_lens
):
    on_device(90, "1")
    layer = make_layer(model=model, backend=backend, tensor_parallel_size=size)
    dims = (layer.impl.qk_head_dim, layer.impl.v_head_dim)
    heads = layer.impl.num_heads
    estimate = make_estimate(COSTS, *dims, backend, "auto", heads, 2048)
    masked, sparse = estimate.microseconds(
        query_lens, context_lens, int(any(context_lens))
    )
    taken = layer._use_sparse_mha(make_metadata(query_lens, context_lens))
    assert taken is (masked < sparse)


def test_batches_of_one_length_go_both_ways(on_device, long_batch):
    """The longest query and the longest sequence, by which vLLM decides, are alike."""
    on_device(90, "1")
    layer = make_layer(backend="FLASH_ATTN_MLA_SPARSE")
    assert layer._use_sparse_mha(long_batch)
    many = make_metadata([16] * 16 + [4096], [14000] * 16 + [0])
    assert not layer._use_sparse_mha(many)


@pytest.mark.parametrize("topk", [512, 1024])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_other_topks_and_sizes_get_an_answer(on_device, topk, size):
    on_device(90, "1")
    layer = make_layer(backend="FLASH_ATTN_MLA_SPARSE", tensor_parallel_size=size)
    answers = {
        layer._use_sparse_mha(make_metadata([n], [0], topk)) for n in (2500, 500_000)
    }
    assert answers == {True, False}


def test_a_step_is_estimated_once(on_device, monkeypatch, long_batch):
    on_device(90, "1")
    asked = []
    ask = PrefillEstimate.microseconds
    monkeypatch.setattr(
        PrefillEstimate,
        "microseconds",
        lambda self, *lens: asked.append(lens) or ask(self, *lens),
    )
    layers = [make_layer(backend="FLASH_ATTN_MLA_SPARSE") for _ in range(3)]
    assert all(layer._use_sparse_mha(long_batch) for layer in layers)
    assert len(asked) == 1
    # Another backend's is another question.
    make_layer(backend="FLASHMLA_SPARSE")._use_sparse_mha(long_batch)
    assert len(asked) == 2


@pytest.mark.parametrize(("family", "switch"), [(100, "1"), (100, None), (90, None)])
def test_elsewhere_vllms_table_decides(on_device, monkeypatch, family, switch):
    on_device(family, switch)
    layer = make_layer(tensor_parallel_size=1)
    for admitted in (True, False):
        monkeypatch.setattr(mla_attention, "_use_masked_mha", lambda **_: admitted)  # noqa: B023
        assert layer._use_sparse_mha(make_metadata([4096], [0])) is admitted


@pytest.mark.parametrize(
    "backend", ["FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE"]
)
def test_what_was_not_measured_stays_with_sparse_mqa(on_device, monkeypatch, backend):
    on_device(90, "1")
    sparse_mla_sm90.prefill_estimate.cache_clear()
    warned = []
    monkeypatch.setattr(
        sparse_mla_sm90.logger, "warning", lambda msg, *args: warned.append(msg % args)
    )
    monkeypatch.setattr(mla_attention, "_use_masked_mha", lambda **_: True)
    layer = make_layer(backend=backend)
    for _ in range(2):
        assert not layer._use_sparse_mha(make_metadata([4096], [0]))
    (line,) = warned
    assert "no coefficients of NVIDIA H200" in line and backend in line


def test_lengths_that_make_no_sense_stay_with_sparse_mqa(on_device, monkeypatch):
    on_device(90, "1")
    warned = []
    monkeypatch.setattr(
        sparse_mla_sm90.logger,
        "warning_once",
        lambda msg, *args: warned.append(msg % args),
    )
    metadata = make_metadata([4096], [-4])
    assert not make_layer()._use_sparse_mha(metadata)
    assert len(warned) == 1 and "negative lengths" in warned[0]


def test_a_log_line_names_the_lengths(on_device):
    on_device(90, "1")
    estimate = make_estimate(COSTS, 192, 128, "FLASH_ATTN_MLA_SPARSE", "auto", 16, 2048)
    line = sparse_mla_sm90.describe_estimate(estimate, 163840)
    ((first, last),) = whole_prompts(estimate, 163840)
    assert f"whole prompts of {first} to {last} tokens" in line
    (few, most), *_ = last_parts(estimate, 8192)
    assert f"the last {few} to {most} of 8192 tokens" in line
    assert "NVIDIA H200, with 16 heads and a top-k of 2048" in line
    # A server's longest sequence bounds what is said.
    line = sparse_mla_sm90.describe_estimate(estimate, 4096)
    assert "2049 to 4096 tokens" in line and "8192" not in line

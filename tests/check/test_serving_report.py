# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether masked MHA will serve a model: the answers, and the reasons against it."""

import json
import math

import pytest

from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention import sparse_mla_attention as layer
from vllm_sparse_mla.check import serving_report
from vllm_sparse_mla.check.serving_report import report_serving
from vllm_sparse_mla.testing.tiny_model import get_spec, make_config

SM90, SM100 = (9, 0), (10, 0)


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.delenv("VLLM_SPARSE_MLA_SM90", raising=False)
    monkeypatch.setattr(serving_report, "_fa4_usable", lambda *_: True)
    (tmp_path / "config.json").write_text(
        json.dumps(make_config(get_spec("dsv32-128h")))
    )
    return str(tmp_path)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4, 8])
def test_ranges_are_those_of_vllms_dispatch(model, tensor_parallel_size):
    report = report_serving(model, tensor_parallel_size, "auto", SM100)
    assert report.used and report.backends
    lengths = [2049, 4096, 4097, 8192, 8193, 16384, 16385, 32768, 32769]
    queries = [511, 512, 1023, 1024, 1536, 2048, 4096, 16384]
    for row in report.backends:

        def dispatched(query_len, seq_len, has_context, backend=row.backend):
            return mla_attention._use_masked_mha(
                backend_name=backend,
                tensor_parallel_size=tensor_parallel_size,
                qk_head_dim=192,
                v_head_dim=128,
                query_len=query_len,
                seq_len=seq_len,
                has_context=has_context,
            )

        for n in lengths:
            admitted = any(r.first <= n <= r.last for r in row.whole_prompts)
            assert admitted == dispatched(n, n, False)
            for query_len in queries:
                admitted = any(
                    r.first <= n <= r.last and query_len >= r.min_query_len
                    for r in row.with_context
                )
                assert admitted == dispatched(query_len, n, True)


def test_longest_sequences_fill_the_workspace(model):
    report = report_serving(model, 8, "auto", SM100)
    words = report.workspace_bytes // 4
    for row in report.workspace:
        for batch_size, longest in row.longest_sequence.items():
            fits, exceeds = (
                math.prod(layer._topk_mask_shape(batch_size, row.query_len, n))
                for n in (longest, longest + 1)
            )
            assert fits <= words < exceeds


@pytest.mark.parametrize(
    "tp, dtype, capability, reason",
    [
        (8, "auto", None, "There is no NVIDIA GPU here."),
        (8, "auto", SM90, "only with VLLM_SPARSE_MLA_SM90=1"),
        (8, "auto", (12, 0), "The GPU is SM120; masked MHA needs SM100."),
        (8, "fp8", SM100, "The KV cache is quantized (fp8)"),
        (3, "auto", SM100, "no prompt length at tensor parallel size 3"),
    ],
)
def test_each_reason_against_it_is_one_sentence(model, tp, dtype, capability, reason):
    report = report_serving(model, tp, dtype, capability)
    assert not report.used
    assert len(report.reasons) == 1
    assert reason in report.reasons[0]
    assert report.reasons[0].endswith(".")


def test_other_models_are_told_why(model, tmp_path):
    config = make_config(get_spec("tiny"))
    path = tmp_path / "other.json"
    path.write_text(json.dumps(config))
    (reason,) = report_serving(str(path), 1, "auto", SM100).reasons
    assert "num_attention_heads 16" in reason
    del config["index_topk"]
    path.write_text(json.dumps(config))
    (reason,) = report_serving(str(path), 1, "auto", SM100).reasons
    assert "no index_topk" in reason


def test_the_opt_in_admits_sm90(model, monkeypatch):
    monkeypatch.setenv("VLLM_SPARSE_MLA_SM90", "1")
    report = report_serving(model, 8, "auto", SM90)
    assert report.used
    json.dumps(report.to_dict())


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["none", "broken", "list"])
def test_an_unreadable_config_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="model must"):
        report_serving(str(path), 1, "auto", SM100)

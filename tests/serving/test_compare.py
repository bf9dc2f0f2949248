# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The comparison that judges served answers, and what reads a server's log."""

import math
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from vllm_sparse_mla.serving.client import Completion, make_prompt
from vllm_sparse_mla.serving.compare import Difference, between, difference, spread
from vllm_sparse_mla.serving.probe import probe_environment
from vllm_sparse_mla.serving.server import Server, variant_environment


def _answer(tokens, logprobs, gaps=None, prompt=(-1.0, -2.0)) -> Completion:
    return Completion(
        status=200,
        token_ids=list(tokens),
        logprobs=list(logprobs),
        gaps=list(gaps or [1.0] * len(tokens)),
        prompt_logprobs=list(prompt),
    )


def test_equal_answers_are_identical():
    answer = _answer([3, 4], [-0.5, -0.25])
    assert difference(answer, answer).identical
    assert spread([answer] * 3).identical


def test_difference_stops_where_tokens_part():
    first = _answer([3, 4, 5], [-0.5, -0.25, -9.0], gaps=[1.0, 0.125, 1.0])
    second = _answer([3, 7, 5], [-0.75, -0.25, -1.0])
    found = difference(first, second)
    assert found == Difference(0.25, 0.25 / 3, 1, 0.125)
    assert not found.identical


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        (Difference(0.02, 0.001), True),
        (Difference(0.04, 0.001), False),
        (Difference(0.02, 0.02), False),
        (Difference(0.02, 0.001, 3, 0.05), True),
        (Difference(0.02, 0.001, 3, 0.5), False),
        (Difference(math.inf, math.inf), False),
    ],
    ids=["inside", "largest", "mean", "tie", "no-tie", "not-finite"],
)
def test_budget(found, fits):
    assert found.within(Difference(0.03, 0.01)) is fits


def test_nan_never_fits_a_budget():
    found = difference(_answer([3], [-1.0]), _answer([3], [math.nan]))
    assert not found.within(Difference(100.0, 100.0))


def test_between_takes_the_worst_pair():
    first = [_answer([3], [-1.0]), _answer([3], [-1.5])]
    assert between(first, [_answer([3], [-2.0])]).largest == 1.0


def test_failed_request_cannot_be_compared():
    failed = Completion(status=500, error="dead")
    with pytest.raises(ValueError, match="second must be a success, got 'dead'"):
        difference(_answer([3], [-1.0]), failed)


def test_prompts_are_reproducible_and_leave_special_tokens_out():
    assert make_prompt(500, 7) == make_prompt(500, 7) != make_prompt(500, 8)
    assert set(range(2, 1024)).issuperset(make_prompt(5000, 1))


def test_variants():
    assert variant_environment("stock") == {"VLLM_PLUGINS": ""}
    assert variant_environment("patched")["VLLM_SPARSE_MLA_SM90"] == "0"
    assert variant_environment("opt-in")["VLLM_SPARSE_MLA_SM90"] == "1"
    with pytest.raises(ValueError, match="variant must be one of .* got 'fast'"):
        variant_environment("fast")


LOG = """\
(pid=11) INFO 11-29 10:00:00 [vllm.plugins.sparse_mla] vllm-sparse-mla 0.1.0 is \
active on vLLM 0.33.0: model_executor/layers/attention/sparse_mla_mask.py
(EngineCore pid=12) INFO 11-29 10:00:01 [plugin.py:59] vllm-sparse-mla 0.1.0 is \
active on vLLM 0.33.0: model_executor/layers/attention/sparse_mla_mask.py
(EngineCore pid=12) WARNING 11-29 10:00:02 [jit_monitor.py:141] Triton kernel JIT \
compilation during inference: _topk_kernel (constexprs={}). This causes a spike.
(EngineCore pid=12) WARNING 11-29 10:00:02 [jit_monitor.py:141] CuTeDSL JIT \
compilation during inference: FlashAttentionForwardSm90. This causes a spike.
"""


def test_log_is_read(tmp_path):
    server = Server(Path("m"), "patched", tmp_path / "log", port=1)
    server.log_path.write_text(LOG)
    assert server.active_pids() == [11, 12]
    assert server.jit_kernels() == ["_topk_kernel", "FlashAttentionForwardSm90"]


def _source(module) -> str:
    return Path(module.__file__).read_text()


def test_log_patterns_match_what_the_code_logs():
    from vllm.utils import jit_monitor
    from vllm_sparse_mla import plugin

    assert re.search(r"vllm-sparse-mla \S+ is active on", _source(plugin))
    source = _source(jit_monitor)
    assert '"%s %s during inference: %s%s. "' in source
    assert re.search(r'event="(kernel )?JIT compilation"', source)


def test_probe_is_found_as_a_plugin(tmp_path, monkeypatch):
    environment = probe_environment(tmp_path, ranks=8)
    assert environment["SPARSE_MLA_PROBE_RANKS"] == "8"
    monkeypatch.setattr(
        sys, "path", [environment["PYTHONPATH"].split(":")[0], *sys.path]
    )
    (found,) = entry_points(group="vllm.general_plugins", name="sparse_mla_probe")
    assert found.load().__module__ == "vllm_sparse_mla.serving.probe"

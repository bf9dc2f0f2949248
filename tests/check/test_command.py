# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm-sparse-mla check` as a process: its report, its exit code, that it can fail."""

import json
import os
import subprocess
import sys

import pytest

ARGUMENTS = ("check", "--budget", "128", "--topk", "32", "--skip-codegen")
PROMPTS = ("--prompts", "150,90,170")

# Runs the command, with `break_it` called once vLLM is prepared.
BROKEN = """
from vllm_sparse_mla.check import environment
from vllm_sparse_mla.cli import app

prepare = environment.prepare_process

def prepare_and_break(*arguments):
    has_gpu = prepare(*arguments)
    break_it()
    return has_gpu

def break_it():
    {body}

environment.prepare_process = prepare_and_break
app()
"""

LOSE_A_KEY = """
    from vllm.model_executor.layers.attention import sparse_mla_attention as layer
    build = layer.build_packed_topk_mask
    def lossy(*args, **kwargs):
        mask = build(*args, **kwargs)
        mask[:, :, 1] &= ~1
        return mask
    layer.build_packed_topk_mask = lossy
"""

# Stock vLLM's offset callback shifts one word right, its neighbour unread.
LOSE_THE_NEXT_WORD = """
    from vllm.model_executor.layers.attention import sparse_mla_mask
    from vllm_sparse_mla.testing.stock import load_stock_module
    stock = load_stock_module(sparse_mla_mask.__name__)
    sparse_mla_mask.offset_dense_mask_mod = stock.offset_dense_mask_mod
"""

CALL_NOTHING = """
    from vllm.model_executor.layers.attention import sparse_mla_attention as layer
    def silent(self, q, *args, output=None, **kwargs):
        args[-1].zero_()
    layer.SparseMLACommonImpl.forward_mha = silent
"""


def _run(*arguments: str, code: str = "", **env: str) -> subprocess.CompletedProcess:
    code = code or "from vllm_sparse_mla.cli import app; app()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | env,
    )


def _json(done: subprocess.CompletedProcess) -> dict:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def report() -> dict:
    done = _run(*ARGUMENTS, *PROMPTS, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return _json(done)


def test_everything_holds(report):
    assert report["ok"]
    environment = report["environment"]
    assert environment["overlay"]["active"]
    assert environment["overlay_in_new_process"]["active"]
    assert environment["versions"]["vllm"] == "0.33.0"
    assert report["codegen"]["skipped"]


def test_says_what_was_stood_in_for(report):
    if report["environment"]["device"].startswith("CPU"):
        assert report["attention"].startswith("reference")
        assert report["stand_ins"] == ["FA4 call", "paged-cache gather", "LSE merge"]
    else:
        assert "LSE merge" not in report["stand_ins"]


def test_each_step_ran_on_both_mask_paths_with_unaligned_contexts(report):
    (schedule,) = report["schedules"]
    assert schedule["unaligned_contexts"] > 0
    paths: dict[int, set[str]] = {}
    for step in schedule["steps"]:
        assert step["ok"] and 0 < step["error_over_budget"] <= 1
        assert step["largest_error"] > 0 and step["budget"] > 0
        paths.setdefault(step["step"], set()).add(step["mask_path"])
    assert {"no context"} in paths.values()
    assert {"whole sequence", "per range"} in paths.values()
    computed = sum(sum(step["query_lens"]) for step in schedule["steps"])
    assert computed >= 150 + 90 + 170


@pytest.mark.parametrize(
    "body",
    [LOSE_A_KEY, LOSE_THE_NEXT_WORD, CALL_NOTHING],
    ids=["lost-key", "lost-word", "no-attention"],
)
def test_a_broken_layer_fails(body):
    done = _run(*ARGUMENTS, *PROMPTS, "--json", code=BROKEN.format(body=body))
    assert done.returncode == 1, done.stdout + done.stderr
    report = _json(done)
    assert not report["ok"]
    assert report["environment"]["ok"]
    assert not all(step["ok"] for step in report["schedules"][0]["steps"])


def test_without_the_overlay_it_fails_and_prints_plainly():
    done = _run(*ARGUMENTS, *PROMPTS, VLLM_PLUGINS="")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Overlay here: FAILED: not active" in done.stdout
    assert "Overlay in a new process: FAILED" in done.stdout
    assert "Result: FAILED" in done.stdout
    assert "\x1b" not in done.stdout


def test_an_unknown_kv_cache_dtype_gets_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arguments = ("--model", str(tmp_path), "--gpu", "sm_100")
    done = _run("check", *arguments, "--kv-cache-dtype", "bogus")
    assert done.returncode == 2
    assert "Error: Invalid value: --kv-cache-dtype must be one of auto, " in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_without_the_overlay_nothing_is_said_of_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arguments = ("--model", str(tmp_path), "--gpu", "sm_100", "--json")
    done = _run("check", *arguments, VLLM_PLUGINS="")
    assert done.returncode == 1, done.stderr
    report = _json(done)
    assert not report["ok"] and report["serving"] is None

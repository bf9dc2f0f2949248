# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm-sparse-mla check`: its report and exit code as a process, that it can fail."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm.model_executor.layers.attention import sparse_mla_attention, sparse_mla_mask
from vllm_sparse_mla.check import environment
from vllm_sparse_mla.cli import app
from vllm_sparse_mla.testing.stock import load_stock_module

ARGUMENTS = ("check", "--budget", "128", "--topk", "32", "--skip-codegen")
PROMPTS = ("--prompts", "150,90,170")


def _run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    code = "from vllm_sparse_mla.cli import app; app()"
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


@pytest.mark.processes
def test_everything_holds(report):
    assert report["ok"]
    environment = report["environment"]
    assert environment["overlay"]["active"]
    assert environment["overlay_in_new_process"]["active"]
    assert environment["versions"]["vllm"] == "0.33.0"
    assert report["codegen"]["skipped"]


@pytest.mark.processes
def test_says_what_was_stood_in_for(report):
    if report["environment"]["device"].startswith("CPU"):
        assert report["attention"].startswith("reference")
        assert report["stand_ins"] == ["FA4 call", "paged-cache gather", "LSE merge"]
    else:
        assert "LSE merge" not in report["stand_ins"]


@pytest.mark.processes
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


@pytest.fixture
def run_here(monkeypatch):
    """Returns a function that runs the command here, where a test can break things.

    Instead of in a new process, too, the overlay is looked for here.
    """
    monkeypatch.setattr(
        environment, "new_process_overlay_state", environment.overlay_state
    )
    # What the command would set for good.
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    return lambda *arguments: CliRunner().invoke(app, arguments)


def lose_a_key(monkeypatch):
    build = sparse_mla_attention.build_packed_topk_mask

    def lossy(*args, **kwargs):
        mask = build(*args, **kwargs)
        mask[:, :, 1] &= ~1
        return mask

    monkeypatch.setattr(sparse_mla_attention, "build_packed_topk_mask", lossy)


def lose_the_next_word(monkeypatch):
    """Stock vLLM's offset callback shifts one word right, its neighbour unread."""
    stock = load_stock_module(sparse_mla_mask.__name__)
    name = "offset_dense_mask_mod"
    monkeypatch.setattr(sparse_mla_mask, name, getattr(stock, name))


def call_nothing(monkeypatch):
    def silent(self, q, *args, output=None, **kwargs):
        args[-1].zero_()

    impl = sparse_mla_attention.SparseMLACommonImpl
    monkeypatch.setattr(impl, "forward_mha", silent)


@pytest.mark.parametrize(
    "break_it", [None, lose_a_key, lose_the_next_word, call_nothing]
)
def test_only_a_broken_layer_fails(run_here, monkeypatch, break_it):
    if break_it:
        break_it(monkeypatch)
    done = run_here(*ARGUMENTS, *PROMPTS, "--json")
    assert done.exit_code == bool(break_it), done.output
    report = json.loads(done.stdout)
    assert report["ok"] is not bool(break_it)
    assert report["environment"]["ok"]
    right = [step["ok"] for step in report["schedules"][0]["steps"]]
    assert all(right) is not bool(break_it)


def test_sequences_that_end_with_a_row_of_the_mask_take_both_paths(run_here):
    done = run_here(*ARGUMENTS, "--prompts", "256", "--json")
    assert done.exit_code == 0, done.output
    steps = json.loads(done.stdout)["schedules"][0]["steps"]
    assert {step["mask_path"] for step in steps} >= {"whole sequence", "per range"}


@pytest.mark.processes
def test_without_the_overlay_it_fails_and_prints_plainly():
    done = _run(*ARGUMENTS, *PROMPTS, VLLM_PLUGINS="")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Overlay here: FAILED: not active" in done.stdout
    assert "Overlay in a new process: FAILED" in done.stdout
    assert "Result: FAILED" in done.stdout
    assert "\x1b" not in done.stdout


def test_an_unknown_kv_cache_dtype_gets_one_line(run_here, monkeypatch, tmp_path):
    # That would change this process for good, and is not reached.
    monkeypatch.setattr(environment, "prepare_process", lambda capability: False)
    (tmp_path / "config.json").write_text("{}")
    arguments = ("--model", str(tmp_path), "--gpu", "sm_100")
    done = run_here("check", *arguments, "--kv-cache-dtype", "bogus")
    assert done.exit_code == 2
    assert "Error: Invalid value: --kv-cache-dtype must be one of auto, " in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.mark.processes
def test_without_the_overlay_nothing_is_said_of_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arguments = ("--model", str(tmp_path), "--gpu", "sm_100", "--json")
    done = _run("check", *arguments, VLLM_PLUGINS="")
    assert done.returncode == 1, done.stderr
    report = _json(done)
    assert not report["ok"] and report["serving"] is None

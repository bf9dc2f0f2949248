# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks' command lines, on a machine without a GPU."""

import csv
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("benchmark_*.py"))
TEMPLATE = (ROOT / "docs/results/b200-template.md").read_text()
COMMANDS = re.findall(r"^python3 benchmarks/(benchmark_\w+)\.py(.*)$", TEMPLATE, re.M)
NEEDS_GPU = "This benchmark needs an NVIDIA GPU, and torch sees none."


@pytest.fixture
def run(monkeypatch):
    """Runs a script's ``main`` with arguments, with no GPU in sight; its exit code."""

    def call(script: str, *arguments: str):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
        try:
            importlib.import_module(script).main()
        except SystemExit as end:
            return end.code
        return None

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_common_options(run, capsys, script):
    assert run(script, "--help") == 0
    text = capsys.readouterr().out
    assert "--csv" in text
    if script != "benchmark_serving_load":  # it has neither shapes nor samples
        assert all(name in text for name in ("--shapes", "--plot", "--repeat"))


@pytest.mark.parametrize(
    "script",
    [
        "benchmark_masked_prefill",
        "benchmark_topk_mask_build",
        "benchmark_first_call",
    ],
)
def test_says_that_it_needs_a_gpu(run, script):
    assert run(script) == NEEDS_GPU


@pytest.mark.parametrize(
    ("script", "shape"),
    [
        ("benchmark_sparse_mla_mask", "1x256x2048/8/striped"),
        ("benchmark_sparse_mla_mask", "3x256x2048/8/ones"),
        ("benchmark_sparse_mla_mask", "1x4096x2048/8/ones"),
        ("benchmark_sparse_mla_mask", "1x256x2048/8/ones/sideways"),
        ("benchmark_masked_prefill", "q0s512"),
        ("benchmark_masked_prefill", "4096"),
    ],
)
def test_refuses_a_wrong_shape(run, capsys, script, shape):
    assert run(script, "--shapes", shape) == 2
    assert "--shapes" in capsys.readouterr().err


@pytest.mark.parametrize(("script", "arguments"), COMMANDS)
def test_commands_for_b200_are_accepted(run, monkeypatch, script, arguments):
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "run_without_gpu", lambda args: None, raising=False)
    assert run(script, *shlex.split(arguments)) in (None, NEEDS_GPU)


@pytest.mark.codegen
def test_mask_benchmark_shows_compiled_evidence(tmp_path):
    rows_file = tmp_path / "mask.csv"
    command = [sys.executable, str(ROOT / "benchmarks/benchmark_sparse_mla_mask.py")]
    command += ["--shapes", "1x256x2048/8/ones", "1x1024x8192/8/ones"]
    command += ["--arch", "sm_100a", "--csv", str(rows_file)]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Nothing was timed" in ended.stdout
    with rows_file.open(newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    # Both shapes are served by one kernel, which is shown once.
    assert list(rows) == ["unmasked", "one word", "stock", "ours"]
    assert rows["ours"]["mask loads"] == "2x128"
    assert rows["stock"]["mask loads"] == "8x32"
    assert str(tmp_path) not in rows["ours"]["command"]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks' command lines, on a machine without a GPU."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import compiled_masks
import gpu_report
import plots
import pytest
import render_results
import torch
from result_tables import read_rows

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("benchmark_*.py"))
STEPS = {
    " ".join(command): command
    for sm90 in (True, False)
    for command in gpu_report.steps(sm90).values()
}
# Their servers are what needs a GPU.
SERVING = {s for s in SCRIPTS if "serving" in s} | {"benchmark_prefill_profile"}
STOPPED = "the arguments are in order"
NEEDS_GPU = "This benchmark needs an NVIDIA GPU, and torch sees none."


def _stop(*args, **kwargs):
    sys.exit(STOPPED)


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
    assert ("--plot" in text) is (script in plots.PLOTS)


@pytest.mark.parametrize(
    "script", sorted({*SCRIPTS} - SERVING - {"benchmark_sparse_mla_mask"})
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
        ("benchmark_mha_layout", "0x16"),
        ("benchmark_mha_layout", "4096"),
        ("benchmark_masked_prefill", "q0s512"),
        ("benchmark_masked_prefill", "4096"),
    ],
)
def test_refuses_a_wrong_shape(run, capsys, script, shape):
    assert run(script, "--shapes", shape) == 2
    assert "--shapes" in capsys.readouterr().err


@pytest.mark.parametrize("command", STEPS.values(), ids=STEPS)
def test_steps_of_the_gpu_report_are_accepted(run, monkeypatch, command):
    script, *arguments = command
    if script == "pytest":
        return
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "running_servers", _stop, raising=False)
    monkeypatch.setattr(compiled_masks, "compiled_masks", _stop)
    assert run(script, *arguments) in (STOPPED, NEEDS_GPU)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--turn-tokens", "0"], "--turn-tokens"),
        (["--turn-tokens", "16", "3000"], "--turn-tokens"),
        (["--rounds", "0"], "--rounds"),
        (["--variants", "opt-in,stock"], "--variants"),
    ],
)
def test_the_multi_turn_benchmark_refuses_what_makes_no_sense(
    run, capsys, arguments, named
):
    assert run("benchmark_serving_multi_turn", *arguments) == 2
    assert f"error: {named}" in capsys.readouterr().err


def test_the_gpu_report_has_every_benchmark():
    assert {command[0] for command in STEPS.values()} == {*SCRIPTS, "pytest"}


def test_the_gpu_report_needs_a_gpu(run):
    assert run("gpu_report") == NEEDS_GPU


@pytest.mark.parametrize(
    ("name", "tag"),
    [("NVIDIA H200", "h200"), ("NVIDIA GB200", "gb200"), ("NVIDIA H100 80GB", "h100")],
)
def test_a_gpu_names_its_page(name, tag):
    assert gpu_report.gpu_tag(name) == tag


def test_a_step_that_fails_is_named_and_the_others_run(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_report, "require_gpu", lambda: None)
    monkeypatch.setattr(gpu_report, "on_sm90", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    monkeypatch.setattr(gpu_report, "run_step", lambda name, *rest: name != "mask")
    command = ["gpu_report.py", "--out", str(tmp_path), "--only", "mask", "first-call"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="^failed: mask$"):
        gpu_report.main()
    page = (tmp_path / "report-h100.md").read_text()
    ran = re.findall(r"^\| (mask|first-call) +\| +(\w+) \|", page, re.M)
    assert ran == [("mask", "failed"), ("first-call", "succeeded")]


def test_outcomes_are_counted_by_file(tmp_path):
    junit = tmp_path / "report.xml"
    junit.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.v1.test_a" name="x" time="1.5"/>'
        '<testcase classname="tests.v1.test_a" name="y" time="1"><failure/></testcase>'
        '<testcase classname="tests.test_b" name="z" time="0"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert gpu_report.junit_rows(junit) == [
        {"file": "tests/test_b.py", "passed": 0, "failed": 0, "skipped": 1}
        | {"seconds": 0.0},
        {"file": "tests/v1/test_a.py", "passed": 1, "failed": 1, "skipped": 0}
        | {"seconds": 2.5},
    ]


def test_the_page_of_a_gpu_begins_as_the_b200s(tmp_path):
    page = gpu_report.begin_page(tmp_path, "h100")
    render_results.render([page])
    assert "# GPU report: H100" in page.read_text()
    assert "**Not run.** No H100 was at hand" in page.read_text()


@pytest.mark.codegen
@pytest.mark.extra
def test_mask_benchmark_shows_what_is_compiled(tmp_path):
    rows_file = tmp_path / "mask.csv"
    command = [sys.executable, str(ROOT / "benchmarks/benchmark_sparse_mla_mask.py")]
    command += ["--shapes", "1x256x256/8/ones/causal", "1x4096x4096/16/ones/causal"]
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
    rows = {row["variant"]: row for row in read_rows([rows_file])}
    # Both shapes are served by one kernel, which is shown once.
    assert list(rows) == ["unmasked", "ours", "stock", "stock, stock vLLM"]
    assert rows["ours"]["mask loads"] == "3x128"
    assert rows["stock"]["mask loads"] == "12x32"
    # FA4's own kernel applies its diagonal to every block of keys.
    loop = {name: int(row["loop"]) for name, row in rows.items()}
    assert loop["unmasked"] < loop["ours"] <= loop["stock"]
    assert loop["stock"] < loop["stock, stock vLLM"] - 200

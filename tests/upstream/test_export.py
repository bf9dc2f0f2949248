# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The exported patches: deterministic, applicable, free of the overlay's names."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_sparse_mla.cli import app
from vllm_sparse_mla.edits import EDITS
from vllm_sparse_mla.export_patch import suite as collecting
from vllm_sparse_mla.export_patch.diff import Change, patch_text
from vllm_sparse_mla.export_patch.port import SHARED_MODULES
from vllm_sparse_mla.export_patch.suite import UPSTREAM_TESTS
from vllm_sparse_mla.guard import EDITED_FILES, OVERLAID_FILES

FOLDER = "tests/v1/attention/sparse_mla"

# What upstream's linter asks for, as far as it bears on text that moves.
RUFF_OPTIONS = (
    "--isolated",
    "--config",
    'lint.isort.known-first-party=["tests", "vllm"]',
)
RUFF_RULES = "E,F,UP,B,ISC,SIM,I,G"
RUFF_IGNORED = "B905,UP007"


@pytest.mark.processes
@pytest.mark.parametrize("options", [(), ("--fa4",)], ids=["vllm", "fa4"])
def test_the_command_exports_the_same_in_another_process(
    options, tmp_path, vllm_changes, fa4_changes
):
    command = [sys.executable, "-c", "from vllm_sparse_mla.cli import app; app()"]
    arguments = ["export-patch", *options, "-o", str(tmp_path / "a.patch")]
    subprocess.run([*command, *arguments], check=True, cwd=tmp_path)
    changes = fa4_changes if options else vllm_changes
    assert (tmp_path / "a.patch").read_text() == patch_text(changes)


def test_every_overlay_file_is_in_one_patch(vllm_changes, fa4_changes):
    changed = [c.path for c in vllm_changes if not c.path.startswith("tests/")]
    changed += [f"vllm/vllm_{c.path}" for c in fa4_changes if c.before is not None]
    overlaid = [file.path for file in OVERLAID_FILES]
    overlaid += [
        file.path
        for file in EDITED_FILES
        if any(edit.exported for edit in EDITS[file.module])
    ]
    assert sorted(changed) == sorted([*overlaid, "vllm/envs.py"])


def test_the_suite_is_in_the_patch_but_for_what_is_about_the_plugin(
    vllm_changes, suite
):
    here = Path(__file__).resolve().parents[1]
    files = {
        f"tests/{p.relative_to(here)}"
        for p in (here / "v1/attention/sparse_mla").rglob("*.py")
    }
    shared = {f"{FOLDER}/sparse_mla_{name}.py" for name in SHARED_MODULES}
    # What the plugin does, and what compares with stock.
    assert suite.left_out == (
        f"{FOLDER}/test_fused_q_sm90.py::edited",
        f"{FOLDER}/test_sparse_mla_launches_gpu.py",
    )
    files -= {*suite.left_out, *UPSTREAM_TESTS.values()}
    exported = {c.path for c in vllm_changes if c.path.startswith("tests/")}
    assert exported == files | shared
    assert suite.files.keys() == exported | UPSTREAM_TESTS.keys()


def test_git_applies_the_patches(
    vllm_changes, fa4_changes, copy_files, git_apply, tmp_path
):
    for name, changes in (("vllm", vllm_changes), ("fa4", fa4_changes)):
        tree = tmp_path / name
        copy_files(tree, changes)
        patch = patch_text(changes)
        git_apply(tree, patch, "--check")
        git_apply(tree, patch)
        for change in changes:
            assert (tree / change.path).read_text() == change.after


def test_no_added_line_speaks_of_the_overlay(vllm_changes, fa4_changes):
    patch = patch_text([*vllm_changes, *fa4_changes])
    found = [
        line
        for line in patch.splitlines()
        if line.startswith("+")
        and re.search(
            r"_upstream_|overla(y|id)|the plugin|vllm.sparse.mla\b|stock_fails", line
        )
    ]
    assert found == []


def added_lines(change: Change) -> set[int]:
    """Numbers of the lines of a changed file that upstream's does not have."""
    numbers: set[int] = set()
    row = 0
    for line in patch_text([change]).splitlines():
        hunk = re.match(r"@@ -\S+ \+(\d+)", line)
        if hunk:
            row = int(hunk[1])
        elif row and line[:1] in ("+", " "):
            if line[0] == "+":
                numbers.add(row)
            row += 1
    return numbers


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
def test_added_lines_follow_upstreams_style(vllm_changes, tmp_path):
    complaints = []
    for change in vllm_changes:
        path = tmp_path / change.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(change.after)
        ours = added_lines(change)
        for arguments, place in (
            (
                (
                    "check",
                    "--select",
                    RUFF_RULES,
                    "--ignore",
                    RUFF_IGNORED,
                    "--output-format=concise",
                ),
                r"^[^:]+:(\d+):",
            ),
            (("format", "--diff"), r"^@@ -(\d+)"),
        ):
            result = subprocess.run(
                [sys.executable, "-m", "ruff", *arguments, *RUFF_OPTIONS, change.path],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            complaints += [
                f"{change.path}: {line}"
                for line in result.stdout.splitlines()
                if (match := re.match(place, line)) and int(match[1]) in ours
            ]
    assert complaints == []


def test_another_version_is_named_in_a_warning(
    vllm_changes, copy_files, tmp_path, suite, monkeypatch
):
    monkeypatch.setattr(collecting, "collect_suite", lambda tests: suite)
    copy_files(tmp_path, vllm_changes)
    file = next(f for f in OVERLAID_FILES if f.sha256)
    with (tmp_path / file.path).open("a") as stream:
        stream.write("\n# Another version.\n")
    output = tmp_path / "out.patch"
    result = CliRunner().invoke(
        app, ["export-patch", "--upstream", str(tmp_path), "-o", str(output)]
    )
    assert result.exit_code == 0
    assert f"{file.path} has SHA-256" in result.output
    assert output.read_text().startswith("diff --git ")

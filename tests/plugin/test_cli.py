# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The console script's dispatch; the commands have tests of their own."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from vllm_sparse_mla import cli

pytestmark = pytest.mark.cpu


def test_help_imports_neither_torch_nor_vllm():
    code = (
        "import sys\nfrom vllm_sparse_mla.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "assert not {'torch', 'vllm', 'cutlass'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("check", "codegen", "export-patch"):
        assert name in done.stdout


@pytest.fixture
def fake_check(monkeypatch):
    """Stands in for the check command; returns the arguments that it was given."""
    seen = {}

    def command(steps: int, json: bool = False, path: str = typer.Option("p")):
        seen.update(steps=steps, json=json, path=path)
        raise typer.Exit(3)

    module = type(sys)("fake_check")
    module.command = command

    monkeypatch.setitem(sys.modules, "vllm_sparse_mla.check.command", module)
    # Python's own way to say that an import is to fail.
    monkeypatch.setitem(sys.modules, "vllm_sparse_mla.codegen.command", None)
    return seen


def test_arguments_and_exit_code_pass_through(fake_check):
    result = CliRunner().invoke(cli.app, ["check", "5", "--json", "--path", "-x"])
    assert result.exit_code == 3
    assert fake_check == {"steps": 5, "json": True, "path": "-x"}


def test_help_of_a_command_is_its_own(fake_check):
    result = CliRunner().invoke(cli.app, ["check", "--help"])
    assert result.exit_code == 0
    assert "steps" in result.output.lower() and "vllm-sparse-mla check" in result.output


def test_command_that_does_not_import_leaves_the_others(fake_check):
    result = CliRunner().invoke(cli.app, ["codegen"])
    assert isinstance(result.exception, ModuleNotFoundError)
    assert CliRunner().invoke(cli.app, ["check", "1"]).exit_code == 3

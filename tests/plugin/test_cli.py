# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The console script: help needs nothing, a wrong argument gets one line."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_sparse_mla.cli import app

COMMANDS = ("check", "codegen", "export-patch", "tiny-model")


HELP = """
import sys
for name in ("torch", "vllm", "cutlass", "libcst", "safetensors"):
    sys.modules[name] = None  # Importing it fails.
from vllm_sparse_mla.cli import app
for arguments in ((), *((name,) for name in sys.argv[1:])):
    print("HELP", flush=True)
    app([*arguments, "--help"], standalone_mode=False)
"""


def test_help_needs_neither_vllm_nor_torch():
    command = [sys.executable, "-c", HELP, *COMMANDS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, of_all, *others = done.stdout.split("HELP\n")
    assert all(name in of_all for name in COMMANDS)
    for name, text in zip(COMMANDS, others, strict=True):
        assert name in text


WRONG = {
    "no such command": ("bogus", "No such command 'bogus'"),
    "no such option": ("check --bogus", "No such option: --bogus"),
    "prompts": ("check --prompts 12,x", "must be token counts such as 300,800,517"),
    "empty prompt": ("check --prompts 0", "must be token counts such as 300,800,517"),
    "budget": ("check --budget 0", "--budget"),
    "heads": ("check --heads 0", "--heads"),
    "top-k": ("check --topk 0", "--topk"),
    "model": ("check --model nowhere", "path 'nowhere' does not exist"),
    "gpu": ("check --model . --gpu sm_80", "'sm_80' is not one of"),
    "no gpu": ("check --model .", "there is no NVIDIA GPU here: name the one that"),
    "gpu without model": ("check --gpu sm_90", "--gpu, --tp and --kv-cache-dtype need"),
    "tp": ("check --model . --tp 0", "--tp"),
    "arch": ("codegen --arch sm_80", "arch must look like sm_100a"),
    "callback": ("codegen --callback bogus", "callback must be one of none, word32"),
    "callback file": ("codegen --callback x.py:f", "there is no file x.py"),
    "callback name": ("codegen --callback FILE:g", "has no function 'g'"),
    "callback unnamed": ("codegen --callback FILE:", "has no function ''"),
    "callback of SM100": (
        "codegen --arch sm_90a --callback word32",
        "FA4 for sm_90a runs none, word32_scalar, dense, offset or",
    ),
    "jobs": ("codegen --jobs 0", "--jobs"),
    "output folder": ("export-patch -o nowhere/a.patch", "there is no folder nowhere"),
    "output is a folder": ("export-patch -o .", "is a directory"),
    "upstream": ("export-patch --upstream nowhere", "dir 'nowhere' does not exist"),
    "upstream file": ("export-patch --upstream FILE", "is a file"),
    "another tree": ("export-patch --upstream .", "must hold vLLM 0.33.0's vllm/"),
    "no arguments": ("tiny-model", "Missing argument"),
    "spec": ("tiny-model bogus out", "name must be one of"),
    "folder": ("tiny-model tiny FILE/out", "Not a directory"),
    "seed": ("tiny-model tiny out --seed -1", "--seed"),
}


@pytest.mark.parametrize("command, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_gets_one_line(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "file.py"
    file.write_text("def f(): ...\n")
    result = CliRunner().invoke(app, command.replace("FILE", str(file)).split())
    assert result.exit_code == 2, result.output
    usage, hint, blank, line = result.stderr.splitlines()
    assert usage.startswith("Usage: ") and not blank
    assert line.startswith("Error: ") and message in line
    assert not result.stdout
    assert list(tmp_path.iterdir()) == [file]


def test_the_model_is_written_where_asked(tmp_path):
    folder = tmp_path / "new/model"
    result = CliRunner().invoke(app, ["tiny-model", "tiny", str(folder)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "MiB" in result.stdout

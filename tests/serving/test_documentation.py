# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""docs/serving.md: its commands run or name their hardware, its log lines exist."""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs/serving.md").read_text()
BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>[^\n]*) -->\n)?```sh\n(?P<code>.*?)```", re.S
)
BLOCKS = [(m["needs"], m["code"]) for m in BLOCK.finditer(PAGE)]
LOG_LINES = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("by log line")[2], re.M)
# Modules of vLLM whose log lines the page explains.
UPSTREAM_MODULES = ("vllm.plugins", "vllm.utils.jit_monitor")


def _run(code: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_block_names_what_it_needs():
    assert len(BLOCKS) > 10
    assert [code for needs, code in BLOCKS if not needs] == []


@pytest.mark.processes
@pytest.mark.parametrize("code", [code for needs, code in BLOCKS if needs == "cpu"])
def test_cpu_command_runs(code, tmp_path):
    output = _run(code, tmp_path)
    if "load_general_plugins" in code:
        assert ("is active on vLLM" in output) is ("VLLM_PLUGINS=" not in code)


VALUES = {"sparse_mla": True, "other,sparse_mla": True, "other": False}
# vLLM reads the variable when it loads its plugins.
FORK = """
import os, sys
import vllm.plugins
for value in sys.argv[1:]:
    print("VALUE", flush=True)
    if not os.fork():
        os.environ["VLLM_PLUGINS"] = value
        vllm.plugins.load_general_plugins()
        break
    os.wait()
"""


@pytest.mark.processes
def test_vllm_plugins(tmp_path):
    """Not set and empty are commands of the page, run above."""
    (tmp_path / "fork.py").write_text(FORK)
    output = _run(f"python3 fork.py {' '.join(VALUES)}", tmp_path)
    _, *answers = output.split("VALUE\n")
    active = ["is active on vLLM" in answer for answer in answers]
    assert dict(zip(VALUES, active, strict=True)) == VALUES


def _strings() -> list[str]:
    files = [
        *(CHECKOUT / "vllm").rglob("*.py"),
        *(CHECKOUT / "vllm_sparse_mla").glob("*.py"),
        *(Path(find_spec(module).origin) for module in UPSTREAM_MODULES),
    ]
    return [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_every_log_line_exists():
    strings = _strings()
    assert len(LOG_LINES) > 8
    assert [line for line in LOG_LINES if not any(line in s for s in strings)] == []

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a change of a file leaves to ruff: order of imports, unused ones, layout."""

import functools
import subprocess
import sys
from importlib.util import find_spec

_CONFIG = 'lint.isort.known-first-party=["tests", "vllm"]'


def tidy(text: str, formatted: bool = True) -> str:
    """Drop unused imports; sort the others and lay the file out, if ``formatted``.

    Args:
        text: A Python file.
        formatted: Whether upstream formats the file as ruff does, with 88 columns.

    Raises:
        ValueError: If ruff is not installed, or cannot read the file.
    """
    rules = "I,F401,D202,D413" if formatted else "F401"
    text = _ruff(text, "check", "--fix", "--select", rules)
    return _ruff(text, "format") if formatted else text


def layout(text: str, line_length: int, like: str) -> str:
    """Format a file, if the one before its change is formatted so.

    Args:
        text: A Python file.
        line_length: Columns.
        like: The file before.

    Raises:
        ValueError: As ``tidy``.
    """
    command = ("format", "--line-length", str(line_length))
    return _ruff(text, *command) if _ruff(like, *command) == like else text


def _ruff(text: str, *arguments: str) -> str:
    if find_spec("ruff") is None:
        raise ValueError("the export needs ruff: pip install 'vllm-sparse-mla[export]'")
    return _answer(text, arguments)


@functools.cache
def _answer(text: str, arguments: tuple[str, ...]) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--quiet"]
    done = subprocess.run(
        [*command, "--config", _CONFIG, "--stdin-filename", "file.py", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stderr or not done.stdout:
        raise ValueError(f"ruff: {done.stderr}")
    return done.stdout

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The built wheel, in an environment of its own that knows no checkout."""

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import vllm
from vllm_sparse_mla import guard

CHECKOUT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip"]


def _run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        list(map(str, command)),
        env=env | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the source distribution so as to test both."""
    folder = tmp_path_factory.mktemp("dist")
    build = (
        f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    )
    _run(sys.executable, "-c", build, cwd=CHECKOUT)
    (sdist,) = folder.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    _run(*PIP, "wheel", *options, sdist, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_contents(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tree = {n for n in names if n.startswith("vllm_sparse_mla/_overlay/")}
    assert tree == {
        f"vllm_sparse_mla/_overlay/{file.path}" for file in guard.OVERLAID_FILES
    }
    assert {n.split("/")[0].split("-")[0] for n in names} == {"vllm_sparse_mla"}


def _snapshot() -> dict[str, str]:
    """Digest of each source and the size of each other file of the installed vLLM."""
    package_dir = Path(vllm.__file__).parent
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix == ".py"
        else str(path.stat().st_size)
        for path in package_dir.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


ACTIVE = f"""
import importlib
import vllm.plugins, vllm_sparse_mla
vllm.plugins.load_general_plugins()
print(vllm_sparse_mla.__file__)
for name in {[f.module for f in guard.OVERLAID_FILES if f.enabled is guard._always]}:
    print(importlib.util.find_spec(name).origin)
"""


@pytest.mark.processes
def test_installed_elsewhere(wheel, tmp_path):
    """Works without the checkout; once uninstalled, vLLM is what it was."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    # vLLM is gigabytes: the new environment borrows the installed one.
    site = Path(
        _run(
            python, "-c", "import site; print(*site.getsitepackages())", cwd=tmp_path
        ).strip()
    )
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    before = _snapshot()

    pip = [*PIP, "--python", python]
    options = ["--no-deps", "--no-index", "--ignore-installed"]
    _run(*pip, "install", *options, wheel, cwd=tmp_path)
    output = _run(python, "-c", ACTIVE, cwd=tmp_path)
    paths = [Path(line) for line in output.splitlines() if line.startswith("/")]
    assert len(paths) > 1
    assert all(path.is_relative_to(site / "vllm_sparse_mla") for path in paths), paths

    _run(*pip, "uninstall", "-y", "vllm-sparse-mla", cwd=tmp_path)
    assert not (site / "vllm_sparse_mla").exists()
    assert _snapshot() == before

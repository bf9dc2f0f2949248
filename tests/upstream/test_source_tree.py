# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The series on vLLM's source distribution: each patch is a state that works.

``make test-patched`` fetches that distribution and names it in VLLM_SOURCE. What the
distribution lacks, compiled modules above all, is linked from the installed vLLM. No
plugin is loaded.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_sparse_mla.cli import app
from vllm_sparse_mla.export_patch.fa4 import PACKAGES, collect_fa4_changes
from vllm_sparse_mla.export_patch.port import GRID
from vllm_sparse_mla.export_patch.vllm_series import read_table

pytestmark = [pytest.mark.extra, pytest.mark.timeout(3000)]

STEPS = read_table()
NUMBERS = range(1, len(STEPS) + 1)
NAMES = [step.name for step in STEPS]
TESTS = "tests/v1/attention"
# What upstream's CI has and this machine may lack: a GPU, or what stands in for one.
# It also checks at the end that the tree's files are what ran.
CPU_ONLY = """
import importlib
import sys
from pathlib import Path

import vllm.utils.torch_utils
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

vllm.utils.torch_utils.PIN_MEMORY = False
install_parent_module()


def pytest_sessionfinish():
    for name in ("sparse_mla_attention", "sparse_mla_mask"):
        name = f"vllm.model_executor.layers.attention.{name}"
        module = importlib.import_module(name)
        assert Path(module.__file__).is_relative_to(Path.cwd()), module
    loaded = {"vllm_sparse_mla.plugin", "vllm_sparse_mla.overlay"} & sys.modules.keys()
    assert not loaded, loaded
"""


class Tree:
    """A clone, as it were: upstream's files and each patch as a commit."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder = folder
        for name in ("vllm", "tests"):
            shutil.copytree(source / name, folder / name)
        shutil.copy(source / "pyproject.toml", folder)
        self.git("init", "-q")
        self.git("add", ".")
        self.git("commit", "-q", "-m", "Base")
        self.base = self.git("rev-parse", "HEAD").strip()

    def git(self, *arguments: str) -> str:
        who = {f"GIT_{x}_{y}": "a@b.invalid" for x in ROLES for y in ("NAME", "EMAIL")}
        return self.run("git", *arguments, env=who | {"GIT_CONFIG_GLOBAL": os.devnull})

    def run(
        self,
        *command: str,
        env: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> str:
        done = subprocess.run(
            command,
            cwd=folder or self.folder,
            env=os.environ | (env or {}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        return done.stdout

    def put(self, number: int) -> list[str]:
        """Check out the first patches; the files that the last of them changes."""
        commits = self.git("rev-list", "--reverse", f"{self.base}..series").split()
        self.git("checkout", "-q", "--detach", commits[number - 1])
        return self.git("diff", "--name-only", "HEAD~1").split()

    def test(self, paths: Sequence[str]) -> None:
        """Run tests as upstream would, but without the conftest of all its tests.

        Whole grids are left to ``make test-grids``, as by ``make test``.
        """
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{self.folder / 'plugin'}",
            "TRITON_INTERPRET": "1",
            "VLLM_PLUGINS": "",
        }
        options = ["-q", "-p", "no:cacheprovider", "-p", "cpu_only", "-W", "ignore"]
        options += ["--confcutdir", TESTS, "--rootdir", str(self.folder)]
        options += ["-m", f"not {GRID}"]
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, *options, *paths]
        found = self.run(*command, env=environment)
        assert re.search(r"\d+ passed", found), found[-2000:]


ROLES = ("AUTHOR", "COMMITTER")
FA4_FOLDERS = ("vllm_flash_attn", "cute")


def link_missing(there: Path, here: Path) -> None:
    """Link what one folder has and the other has not, at any depth."""
    for entry in there.iterdir():
        target = here / entry.name
        if entry.name == "__pycache__":
            continue
        # FA4's folders are real, since files of theirs are replaced.
        if entry.is_dir() and (target.is_dir() or entry.name in FA4_FOLDERS):
            target.mkdir(exist_ok=True)
            link_missing(entry, target)
        elif not target.exists():
            target.symlink_to(entry)


@pytest.fixture(scope="module")
def tree(upstream_root, tmp_path_factory) -> Tree:
    """The distribution with the series applied by ``git am``."""
    source = os.environ.get("VLLM_SOURCE")
    assert source, "VLLM_SOURCE must name vLLM's source: `make test-patched` does"
    tree = Tree(tmp_path_factory.mktemp("clone"), Path(source))
    patches = tmp_path_factory.mktemp("series")
    options = ["--series", str(patches), "--upstream", str(tree.folder)]
    result = CliRunner().invoke(app, ["export-patch", *options])
    assert result.exit_code == 0, result.output
    tree.git("checkout", "-q", "-b", "series")
    tree.git("am", "-q", *map(str, sorted(patches.glob("*.patch"))))
    link_missing(upstream_root / "vllm", tree.folder / "vllm")
    plugin = tree.folder / "plugin"
    plugin.mkdir()
    (plugin / "cpu_only.py").write_text(CPU_ONLY)
    return tree


def test_git_am_takes_the_series_as_it_is_written(tree):
    subjects = tree.git("log", "--reverse", "--format=%s", f"{tree.base}..series")
    assert subjects.splitlines() == [step.subject for step in STEPS]


def test_upstreams_own_tests_of_masks_are_still_there(tree):
    path = f"{TESTS}/test_sparse_mla_mask.py"
    changed = tree.git("diff", "--numstat", tree.base, "series", "--", path).split()
    before = tree.git("show", f"{tree.base}:{path}").split("\n\n\n")
    after = tree.git("show", f"series:{path}").split("\n\n\n")
    assert changed and {part.strip() for part in before[1:]} <= {
        part.strip() for part in after
    }


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_upstreams_linter_takes_each_patch(tree, number):
    """By upstream's own configuration, with the version of ruff that is here."""
    files = tree.put(number)
    ruff = [sys.executable, "-m", "ruff"]
    tree.run(*ruff, "check", "--no-cache", *files)
    tree.run(*ruff, "format", "--no-cache", "--check", *files)
    tree.run(sys.executable, "-m", "py_compile", *files)


def test_upstreams_type_checker_takes_the_series(tree, tmp_path):
    """In an environment of its own with what upstream's pre-commit hook names.

    And on a clone without what the tree has of the installed vLLM.
    """
    clone = tmp_path / "clone"
    tree.git("worktree", "add", "-q", "--detach", str(clone), "series")
    hooks = Path(os.environ["VLLM_SOURCE"], ".pre-commit-config.yaml").read_text()
    needs = re.search(r"id: mypy .*?additional_dependencies: \[(.*?)\]", hooks, re.S)[1]
    venv.create(tmp_path / "mypy", with_pip=True)
    python = str(tmp_path / "mypy/bin/python")
    tree.run(python, "-m", "pip", "install", "-q", *needs.replace('"', "").split(", "))
    names = tree.git("diff", "--name-only", tree.base, "series", "--", "vllm").split()
    command = (python, "-m", "mypy", "--python-version", "3.11")
    tree.run(*command, *names, folder=clone)


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_each_patch_passes_the_tests_that_it_brings(tree, number):
    files = tree.put(number)
    tests = [path for path in files if "/test_" in path]
    assert tests
    tree.test(tests)


def test_the_whole_series_and_the_fa4_patch_pass_the_suite(tree, upstream_root):
    tree.put(len(STEPS))
    links = {}
    for change in collect_fa4_changes(upstream_root, None):
        if change.path.startswith("flash_attn/"):
            path = tree.folder / "vllm/vllm_flash_attn" / change.path.partition("/")[2]
            assert path.parent.resolve().is_relative_to(tree.folder)
            links[path] = path.readlink()
            path.unlink()
            path.write_text(change.after.replace(*PACKAGES))
    tree.test([f"{TESTS}/sparse_mla", f"{TESTS}/test_sparse_mla_mask.py"])
    # The tests of single patches, which may come after this one, have stock FA4.
    for path, target in links.items():
        path.unlink()
        path.symlink_to(target)

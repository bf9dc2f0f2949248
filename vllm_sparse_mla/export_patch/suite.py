# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The suite that travels with the patch: its tests and the modules they share."""

from dataclasses import dataclass
from pathlib import Path

from vllm_sparse_mla.export_patch.port import SHARED_MODULES, port_test, upstream_module

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER = "tests/v1/attention/sparse_mla"
#: Tests that upstream's file of that name gets, by path there.
UPSTREAM_TESTS = {
    "tests/v1/attention/test_sparse_mla_mask.py": f"{_FOLDER}/test_sparse_mla_mask.py"
}


@dataclass(frozen=True)
class Suite:
    """Tests at upstream's paths."""

    files: dict[str, str]  # text of each file, by path
    # Files and ``file::function`` that are about this package.
    left_out: tuple[str, ...]


def tests_root() -> Path | None:
    """Folder of the checkout's tests; None for an installed wheel."""
    root = _PACKAGE.parent / "tests"
    return root if (root / "v1/attention/sparse_mla").is_dir() else None


def collect_suite(tests: Path) -> Suite:
    """Rewrite ``v1/attention/sparse_mla`` of these tests for upstream's repository."""
    sources = {
        f"{upstream_module(name).replace('.', '/')}.py": _PACKAGE / f"testing/{name}.py"
        for name in SHARED_MODULES
    }
    upstreams = {ours: theirs for theirs, ours in UPSTREAM_TESTS.items()}
    for path in sorted((tests.parent / _FOLDER).rglob("*.py")):
        name = path.relative_to(tests.parent).as_posix()
        sources[upstreams.get(name, name)] = path
    files, left_out = {}, []
    for name, path in sources.items():
        test = port_test(path.read_text())
        left_out += [f"{name}::{function}" for function in test.left_out]
        if test.text is None:
            left_out.append(name)
        else:
            files[name] = test.text
    return Suite(files, tuple(left_out))

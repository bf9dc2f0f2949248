# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The overlay tree: its files, and that a checkout never hides the installed vLLM."""

import hashlib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import vllm
from vllm_sparse_mla import guard

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["vllm", "tests", "benchmarks"])
def test_no_package_marker(folder):
    assert list((CHECKOUT / folder).rglob("__init__.py")) == []


def test_installed_vllm_wins():
    assert CHECKOUT / "vllm" not in Path(vllm.__file__).parents


def test_every_file_of_the_tree_is_in_the_table():
    on_disk = {str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / "vllm").rglob("*.py")}
    assert on_disk == {file.path for file in guard.OVERLAID_FILES}


def test_table_matches_the_published_release():
    assert distribution("vllm").version == guard.VLLM_VERSION
    package_dir = Path(vllm.__file__).parent
    for file in guard.OVERLAID_FILES:
        path = package_dir / file.path_in_package
        if file.sha256 is None:
            assert not path.exists()
        else:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256

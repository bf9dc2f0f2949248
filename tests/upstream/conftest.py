# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The exported patches, and trees made from the installed vLLM to apply them to."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vllm_sparse_mla.export_patch.changes import (
    collect_vllm_sources,
    installed_vllm_root,
    suite_sources,
)
from vllm_sparse_mla.export_patch.diff import Change
from vllm_sparse_mla.export_patch.fa4 import collect_fa4_changes
from vllm_sparse_mla.export_patch.source import Source
from vllm_sparse_mla.export_patch.suite import Suite, collect_suite, tests_root


@pytest.fixture(scope="session")
def upstream_root() -> Path:
    """Folder that holds the installed ``vllm`` package."""
    return installed_vllm_root()


@pytest.fixture(scope="session")
def suite() -> Suite:
    """The tests that travel with the patch."""
    return collect_suite(tests_root())


@pytest.fixture(scope="session")
def vllm_sources(upstream_root: Path, suite: Suite) -> list[Source]:
    """What is made of vLLM's own files, and of the tests."""
    return collect_vllm_sources(upstream_root) + suite_sources(upstream_root, suite)


@pytest.fixture(scope="session")
def vllm_changes(vllm_sources: list[Source]) -> list[Change]:
    """Changes of vLLM's own files."""
    return [source.change() for source in vllm_sources]


@pytest.fixture(scope="session")
def fa4_changes(upstream_root: Path) -> list[Change]:
    """Changes of FlashAttention-4, at its own repository's paths."""
    return collect_fa4_changes(upstream_root, tests_root())


@pytest.fixture(scope="session")
def git_apply() -> Callable[..., None]:
    """Function that runs ``git apply`` in a tree, with a patch's text as input."""

    def apply(tree: Path, patch: str, *options: str) -> None:
        # Without the ceiling, git would look for a repository above the tree.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
        subprocess.run(
            ["git", "apply", *options, "-"],
            cwd=tree,
            env=environment,
            input=patch,
            text=True,
            check=True,
        )

    return apply


@pytest.fixture(scope="session")
def copy_files(upstream_root: Path) -> Callable[[Path, Sequence[Change]], None]:
    """Function that makes a tree of those upstream files that a patch changes."""

    def copy(tree: Path, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.before is not None:
                target = tree / change.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(change.before)

    return copy

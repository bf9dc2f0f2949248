# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files of a series, given to ``git am``."""

import os
import subprocess
from pathlib import Path

import pytest

from vllm_sparse_mla.export_patch.diff import Change
from vllm_sparse_mla.export_patch.series import Patch, file_name, write_series

BASE = "a = 1\nb = 2\n\n\nprint(a, b)\n"
SECOND = BASE.replace("b = 2", "b = 3  # \N{GREEK SMALL LETTER ALPHA}")
SERIES = (
    Patch(
        "Add what: a file, and more",
        "Out of where it was.\n\n    - a list\n    -- and a line\n",
        (Change("new/file.py", None, "x = '-- '\n"),),
    ),
    Patch(
        "Change \N{GREEK SMALL LETTER ALPHA}, then stop.",
        "Because.",
        (
            Change("base.py", BASE, SECOND),
            Change("new/file.py", "x = '-- '\n", "x = ''\n"),
        ),
    ),
)


def git(tree: Path, *arguments: str) -> str:
    identity = {f"GIT_COMMITTER_{name}": "a@b.invalid" for name in ("NAME", "EMAIL")}
    environment = os.environ | identity | {"GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", *arguments], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with ``base.py`` in it."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "base.py").write_text(BASE)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "Base", "--author", "A <a@b.invalid>")
    return folder


def test_git_am_takes_subjects_messages_and_files(tree, tmp_path):
    paths = write_series(tmp_path / "series", SERIES)
    git(tree, "am", *map(str, paths))
    assert git(tree, "log", "--reverse", "--format=%B%x01").split("\x01")[1:3] == [
        f"\n{patch.subject}\n\n{patch.message.strip()}\n" for patch in SERIES
    ]
    assert (tree / "base.py").read_text() == SECOND
    assert (tree / "new/file.py").read_text() == "x = ''\n"


def test_names_sort_in_order_of_the_series(tmp_path):
    paths = write_series(tmp_path, SERIES)
    assert [path.name for path in paths] == [
        "0001-Add-what-a-file-and-more.patch",
        "0002-Change-then-stop.patch",
    ]
    assert sorted(paths) == paths
    assert len(file_name(1, 20 * "word ")) <= 64


def test_a_second_export_is_equal_and_another_series_in_the_folder_is_refused(
    tmp_path,
):
    first = [path.read_bytes() for path in write_series(tmp_path, SERIES)]
    assert [path.read_bytes() for path in write_series(tmp_path, SERIES)] == first
    with pytest.raises(ValueError, match="other patches: 0001-Add.*, 0002-Change"):
        write_series(tmp_path, [SERIES[1]])


@pytest.mark.parametrize(
    "subject, message, what",
    [
        ("Two\nlines", "m", "must be one line"),
        ("[Tag] Subject", "m", "without a tag"),
        ("S", "", "it is empty"),
        ("S", "One.\n---\nTwo.", "'---'"),
        ("S", "Subject: another", "'Subject:'"),
        ("S", "One.\n\ndiff of a b", "'diff '"),
    ],
    ids=["two-lines", "tag", "no-message", "dashes", "header", "diff"],
)
def test_what_git_am_would_misread_is_refused(subject, message, what):
    with pytest.raises(ValueError, match=what):
        Patch(subject, message, SERIES[0].changes)


def test_a_patch_without_changes_is_refused():
    with pytest.raises(ValueError, match="changes nothing"):
        Patch("S", "M", (Change("a.py", BASE, BASE),))

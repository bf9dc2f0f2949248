# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Patches in the order in which they apply, as files that ``git am`` takes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_sparse_mla.export_patch.diff import Change, patch_text

# The same for every export, so that two of them are equal: who sends a series commits
# it under a name of their own (`git am`, then `git commit --amend --reset-author`).
_AUTHOR = "Contributors to the vLLM project <contributors@vllm.invalid>"
_DATE = "Thu, 1 Jan 2026 00:00:00 +0000"
_NO_COMMIT = 40 * "0"

# What `git am` would take for the end of a message, or for a header in its place.
_NOT_A_MESSAGE = re.compile(
    r"^(---|diff |Index: |From |>From |From:|Date:|Subject:|-- $)", re.MULTILINE
)


@dataclass(frozen=True)
class Patch:
    """One commit of a series."""

    subject: str  # one line, imperative
    message: str  # what, why and how it was tested; paragraphs of wrapped lines
    # Its files; ``before`` is the file as the patches before it leave it.
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        # A tag in brackets would go the way of `[PATCH 1/2]`.
        if not re.fullmatch(r"[^\s\[].*", self.subject):
            raise ValueError(
                f"a subject must be one line without a tag, got {self.subject!r}"
            )
        found = _NOT_A_MESSAGE.search(self.message)
        if found or not self.message.strip():
            raise ValueError(
                f"git am would not take the message of {self.subject!r} as one: "
                f"{found[0] if found else 'it is empty'!r}"
            )
        if not patch_text(self.changes):
            raise ValueError(f"{self.subject!r} changes nothing")


def file_name(number: int, subject: str) -> str:
    """Name of a patch file, as ``git format-patch`` would give it."""
    return (
        f"{number:04}-{re.sub(r'[^A-Za-z0-9._]+', '-', subject)[:52].strip('-.')}.patch"
    )


def mail_text(patch: Patch, number: int, total: int) -> str:
    """A patch, one of ``total``, as a mail: a header, the message, the diff."""
    return (
        f"From {_NO_COMMIT} Mon Sep 17 00:00:00 2001\n"
        f"From: {_AUTHOR}\n"
        f"Date: {_DATE}\n"
        f"Subject: [PATCH {number}/{total}] {patch.subject}\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n"
        f"\n{patch.message.strip()}\n---\n\n{patch_text(patch.changes)}"
    )


def write_series(folder: Path, patches: Sequence[Patch]) -> list[Path]:
    """Write a series, in its order; ``git am FOLDER/*.patch`` applies it.

    Files of an earlier export are overwritten.

    Raises:
        ValueError: If the folder holds patches of another series, which ``git am``
            would apply too.
    """
    total = len(patches)
    paths = [folder / file_name(i, p.subject) for i, p in enumerate(patches, 1)]
    folder.mkdir(parents=True, exist_ok=True)
    others = set(folder.glob("*.patch")) - set(paths)
    if others:
        names = ", ".join(sorted(path.name for path in others))
        raise ValueError(f"{folder} holds other patches: {names}")
    for number, (path, patch) in enumerate(zip(paths, patches), 1):
        path.write_text(mail_text(patch, number, total), encoding="utf-8")
    return paths

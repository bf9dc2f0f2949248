# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Changed files as one unified diff."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_sparse_mla.export_patch.splice import Definition


@dataclass(frozen=True)
class Change:
    """One file of a patch."""

    path: str  # path in the upstream repository
    before: str | None  # upstream's text; None for a new file
    after: str  # the new text
    # In what a spliced file differs; empty for a new file.
    definitions: tuple[Definition, ...] = ()
    warning: str = ""  # what a reader of the patch should know; empty if nothing


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def patch_text(changes: Iterable[Change]) -> str:
    """Unified diff of several files, ordered by path, that ``git apply`` takes."""
    parts: list[str] = []
    for change in sorted(changes, key=lambda c: c.path):
        if change.before == change.after:
            continue
        old, new = f"a/{change.path}", f"b/{change.path}"
        parts.append(f"diff --git {old} {new}\n")
        if change.before is None:
            old = "/dev/null"
            parts.append("new file mode 100644\n")
        lines = difflib.unified_diff(
            _lines(change.before or ""), _lines(change.after), old, new
        )
        for line in lines:
            end = "" if line.endswith("\n") else "\n\\ No newline at end of file\n"
            parts.append(line + end)
    return "".join(parts)

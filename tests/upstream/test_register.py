# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""docs/patches.md, the overlay tree, the guard and the exported patch agree."""

import re
from pathlib import Path

import pytest

from vllm_sparse_mla.edits import EDITS
from vllm_sparse_mla.guard import EDITED_FILES, OVERLAID_FILES, VLLM_VERSION

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["Definitions", "Why", "Differs", "Checked", "Upstream PRs", "Drop when"]
NEW_FILE = {"the file": "new"}


def fields(text: str) -> dict[str, str]:
    """The ``- Name: value`` items at the head of a section."""
    items = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    pairs = (item.split(":", 1) for item in items)
    return {name: " ".join(value.split()) for name, value in pairs}


def definitions(entry: dict[str, str]) -> dict[str, str]:
    return {
        name.strip("` "): kind
        for name, kind in re.findall(r"([^,]+) \((\w+)\)", entry["Definitions"])
    }


@pytest.fixture(scope="module")
def register() -> dict[str, dict[str, dict[str, str]]]:
    """Path -> entry -> field -> value; the file's own fields under the entry ''."""
    text = (ROOT / "docs/patches.md").read_text()
    sections = re.split(r"^## `(.+)`\n", text, flags=re.MULTILINE)[1:]
    result = {}
    for path, section in zip(sections[::2], sections[1::2], strict=True):
        head, *parts = re.split(r"^### (.+)\n", section, flags=re.MULTILINE)
        entries = dict(zip(parts[::2], map(fields, parts[1::2]), strict=True))
        result[path] = {"": fields(head), **entries}
    return result


def test_every_entry_has_every_field(register):
    for path, entries in register.items():
        assert len(entries) > 1, path
        for name, entry in entries.items():
            if name:
                assert list(entry) == FIELDS, (path, name)
                assert all(entry.values()), (path, name)


def test_files_are_the_overlay_trees(register):
    tree = {p.relative_to(ROOT).as_posix() for p in (ROOT / "vllm").rglob("*.py")}
    edited = {file.path for file in EDITED_FILES}
    assert tree == set(register) - {"vllm/envs.py"} - edited
    assert tree == {file.path for file in OVERLAID_FILES}


def test_hashes_and_conditions_are_the_guards(register, monkeypatch):
    monkeypatch.delenv("VLLM_SPARSE_MLA_SM90", raising=False)
    for file in OVERLAID_FILES + EDITED_FILES:
        head = register[file.path][""]
        expected = f"vLLM {VLLM_VERSION}, SHA-256 `{file.sha256}`"
        assert head["Upstream"] == (expected if file.sha256 else "none"), file.path
        always = "always" if file.enabled() else "with `VLLM_SPARSE_MLA_SM90=1`"
        assert head["Loaded"] == always, file.path


def test_definitions_are_those_of_the_exported_patch(
    register, vllm_changes, fa4_changes
):
    paths = {change.path: change.path for change in vllm_changes}
    paths |= {change.path: f"vllm/vllm_{change.path}" for change in fa4_changes}
    exported = {
        paths[c.path]: {d.name: d.kind for d in c.definitions} if c.before else NEW_FILE
        for c in [*vllm_changes, *fa4_changes]
        if not c.path.startswith("tests/")
    }
    for file in EDITED_FILES:
        for edit in EDITS[file.module]:
            if not edit.exported:
                exported.setdefault(file.path, {})[edit.function] = "edited"
    registered = {}
    for path, entries in register.items():
        registered[path] = {}
        for name, entry in entries.items():
            if name:
                found = definitions(entry)
                assert not found.keys() & registered[path].keys(), (path, name)
                registered[path] |= found
    assert registered == exported


def test_what_checks_an_entry_exists(register):
    for path, entries in register.items():
        for name, entry in entries.items():
            if name:
                places = re.findall(r"`(tests/[^`]+)`", entry["Checked"])
                assert places, (path, name)
                assert all((ROOT / place).exists() for place in places), (path, name)

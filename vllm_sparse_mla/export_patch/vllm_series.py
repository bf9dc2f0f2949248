# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The patch of vLLM's own files as a series, each a state that works.

``vllm_series.toml`` says which definition comes with which patch. All come from the
overlay: a patch has the definitions of those before it and its own, without what hangs
on later ones (``absent.without``). Before the overlay's definition of a function of
upstream's is there, ``fixes.py`` may edit upstream's.
"""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from vllm_sparse_mla.edits import Edit, apply_edits
from vllm_sparse_mla.export_patch import tree
from vllm_sparse_mla.export_patch.absent import without
from vllm_sparse_mla.export_patch.diff import Change
from vllm_sparse_mla.export_patch.fixes import FIXES
from vllm_sparse_mla.export_patch.series import Patch
from vllm_sparse_mla.export_patch.source import Source
from vllm_sparse_mla.export_patch.suite import UPSTREAM_TESTS
from vllm_sparse_mla.export_patch.tidy import tidy

TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Step:
    """A patch of the table."""

    name: str  # what the table and ``fixes.py`` call it, and its page in docs/upstream
    subject: str  # of its commit
    message: str  # of its commit
    # By file: qualified names of definitions, or ``"*"``, all that no other patch
    # brings.
    brings: Mapping[str, Sequence[str] | str]


def read_table() -> list[Step]:
    """The patches in their order."""
    return [Step(**row) for row in tomllib.loads(TABLE.read_text())["patch"]]


class Prefixes:
    """States of vLLM's files after the first patches of a series."""

    def __init__(self, steps: Sequence[Step], sources: Sequence[Source]) -> None:
        """Assigns each definition to a patch.

        Raises:
            ValueError: If a definition is in no patch, or the table names one that is
                not there.
        """
        self.steps = steps
        self.sources = sorted(sources, key=lambda source: source.path)
        self._texts: dict[tuple, str | None] = {}
        self._modules = {source.module: source for source in sources}
        self._places = {
            source.path: {x: self._place(source, x) for x in source.definitions}
            for source in sources
        }
        for step in steps:
            for path, names in step.brings.items():
                there = self._places.get(path)
                if there is None and path in UPSTREAM_TESTS:
                    continue  # that needs upstream's own tests
                missing = set(names) - {"*", *(there or ())}
                if there is None or missing:
                    raise ValueError(
                        f"{step.name} brings {sorted(missing) or 'definitions'} of "
                        f"{path}, which are not there"
                    )

    def _place(self, source: Source, name: str) -> int:
        places: dict[str, int] = {}
        for number, step in enumerate(self.steps, 1):
            names = step.brings.get(source.path, ())
            places |= dict.fromkeys(names, number)
        # An attribute of a function comes with it unless it is named itself.
        for key in (name, name.rpartition(".")[0], "*"):
            if key in places:
                return places[key]
        raise ValueError(f"no patch of the series brings {name} of {source.path}")

    def text(self, source: Source, length: int) -> str | None:
        """A file after the first ``length`` patches; None if it is not there yet."""
        places = self._places[source.path]
        wanted = frozenset(name for name in places if places[name] <= length)
        names, members, modules = self._later(source, length)
        fixes = tuple(
            edit
            for step in self.steps[:length]
            for edit in FIXES.get(step.name, {}).get(source.path, ())
        )
        key = source, wanted, names, members, modules, fixes
        if key not in self._texts:
            self._texts[key] = _text(*key)
        return self._texts[key]

    def _later(self, source: Source, length: int) -> tuple[frozenset[str], ...]:
        """Names, members and modules of later patches that a file knows of."""
        places = self._places[source.path]
        later = {x for x in source.new if places[x] > length}
        names = {x for x in later if "." not in x}
        members = {x.rpartition(".")[2] for x in later if source.is_member(x)}
        modules = set()
        for binding in source.imports:
            if self._is_later(binding.module, binding.name, length):
                names.add(binding.bound)
            if self._is_later(binding.target, None, length):
                names.add(binding.bound)
            if self._is_later(binding.module, None, length):
                modules.add(binding.module)
        return frozenset(names), frozenset(members), frozenset(modules)

    def _is_later(self, module: str, name: str | None, length: int) -> bool:
        """Whether a definition, or all of a module, comes with a later patch."""
        source = self._modules.get(module)
        if source is None:
            return False
        places = self._places[source.path]
        if name is not None:
            return name in source.new and places[name] > length
        return source.upstream is None and min(places.values()) > length

    def patches(self) -> list[Patch]:
        """The series."""
        done = {source.path: source.upstream for source in self.sources}
        result = []
        for length, step in enumerate(self.steps, 1):
            texts = {source.path: self.text(source, length) for source in self.sources}
            changes = tuple(
                Change(path, done[path], text)
                for path, text in texts.items()
                if text != done[path]
            )
            result.append(Patch(step.subject, step.message, changes))
            done = texts
        return result


def _text(
    source: Source,
    wanted: Collection[str],
    names: Collection[str],
    members: Collection[str],
    modules: Collection[str],
    fixes: Sequence[Edit],
) -> str | None:
    before = source.upstream
    if fixes:
        before = tidy(apply_edits(before, fixes, moves_lines=True))
    if not wanted:
        return before
    absent = re.compile(rf"\b({'|'.join([*names, *members, *modules])})\b")

    def change(name: str, node: cst.CSTNode) -> cst.CSTNode:
        if name not in wanted or not absent.search(tree.code(node)):
            return node
        return without(node, names, members, modules)

    own = source.map(change) if names or members or modules else source.own
    # A class of which upstream has the other members is there whatever is wanted.
    others = set(source.definitions) - set(wanted)
    return source.make(before, own, lambda name: name not in others)[0]

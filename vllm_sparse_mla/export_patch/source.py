# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One file of upstream's, or a new one, and what the overlay makes of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import libcst as cst
import libcst.matchers as m

from vllm_sparse_mla.edits import Edit, apply_edits
from vllm_sparse_mla.export_patch import tree
from vllm_sparse_mla.export_patch.diff import Change
from vllm_sparse_mla.export_patch.splice import Definition, Rules, splice
from vllm_sparse_mla.export_patch.switch import declare_switches
from vllm_sparse_mla.export_patch.tidy import tidy


@dataclass(frozen=True, eq=False)
class Source:
    """What upstream's file and a changed one are made of."""

    path: str  # in upstream's repository
    upstream: str | None  # upstream's text; None for a new file
    # The overlay's text, or a ported test; empty if only edits change it.
    overlay: str = ""
    rules: Rules = Rules()  # of the splice into upstream's
    edits: Sequence[Edit] = ()  # of single expressions of upstream's
    switches: Sequence[str] = ()  # environment variables to declare
    warning: str = ""  # what a reader of the patch should know; empty if nothing

    @property
    def module(self) -> str:
        """Dotted name of the file."""
        return self.path.removesuffix(".py").replace("/", ".")

    @cached_property
    def own(self) -> cst.Module:
        """Tree of ``overlay``."""
        return cst.parse_module(self.overlay)

    @cached_property
    def imports(self) -> tuple[tree.Binding, ...]:
        """Names bound by imports of ``overlay``, inside functions too."""
        found = m.findall(self.own, m.ImportFrom())
        return tuple(b for statement in found for b in tree.bindings_of(statement))

    @cached_property
    def _theirs(self) -> cst.Module:
        return cst.parse_module(self.upstream or "")

    @cached_property
    def _classes(self) -> set[str]:
        return {n.name.value for n in self._theirs.body if isinstance(n, cst.ClassDef)}

    def _names(self, module: cst.Module) -> Iterator[str]:
        """Qualified names; members of a class that upstream has too."""
        for node in module.body:
            name = tree.name_of(node)
            if name in self._classes and isinstance(node, cst.ClassDef):
                yield from (f"{name}.{x}" for x in tree.names(node.body.body))
            elif name is not None:
                yield name

    @cached_property
    def definitions(self) -> frozenset[str]:
        """Qualified names of all that is new, changed or removed."""
        edited = (edit.function for edit in self.edits)
        return frozenset(
            [*self._names(self.own), *edited, *self.rules.removed, *self.switches]
        )

    @cached_property
    def new(self) -> frozenset[str]:
        """Qualified names of definitions that upstream does not have."""
        return frozenset(self._names(self.own)) - {*self._names(self._theirs)}

    def is_member(self, name: str) -> bool:
        """Whether a qualified name is of a member of a class of upstream's."""
        return name.partition(".")[0] in self._classes

    def map(self, change: Callable[[str, cst.CSTNode], cst.CSTNode]) -> cst.Module:
        """``own`` with each definition changed, called with its qualified name."""
        body = []
        for node in self.own.body:
            name = tree.name_of(node)
            if name in self._classes and isinstance(node, cst.ClassDef):
                inner = [
                    change(f"{name}.{x}", n) if (x := tree.name_of(n)) else n
                    for n in node.body.body
                ]
                node = node.with_deep_changes(node.body, body=inner)
            elif name is not None:
                node = change(name, node)
            body.append(node)
        return self.own.with_changes(body=body)

    def change(self) -> Change:
        """The file with all that the overlay has."""
        after, definitions = self.make(self.upstream, self.own)
        return Change(self.path, self.upstream, after, definitions, self.warning)

    def make(
        self,
        before: str | None,
        own: cst.Module,
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> tuple[str, tuple[Definition, ...]]:
        """The file with the definitions that are wanted, by qualified name, and those.

        ``before`` and ``own`` are ``upstream`` and ``own``, or made of them.
        """
        if self.switches:
            names = [name for name in self.switches if wanted(name)]
            added = tuple(Definition(name, "new") for name in names)
            return declare_switches(before, names), added
        if self.edits:
            edits = [edit for edit in self.edits if wanted(edit.function)]
            edited = tuple(Definition(edit.function, "edited") for edit in edits)
            after = tidy(apply_edits(before, edits))
            for call in filter(None, (edit.untyped for edit in edits)):
                line = next(x for x in after.splitlines() if call in x)
                after = after.replace(line, f"{line}  # type: ignore[attr-defined]")
            return after, edited
        if before is None:
            body = [n for n in own.body if (x := tree.name_of(n)) is None or wanted(x)]
            return tidy(own.with_changes(body=body).code), ()
        spliced = splice(own.code, before, self.rules, wanted)
        return spliced.text, spliced.definitions

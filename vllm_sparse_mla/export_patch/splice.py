# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Puts the definitions of an overlay file into upstream's file.

An overlay file replaces definitions one by one: a function or constant by another of
the same name, a method by one in a subclass of upstream's class. Here the same text
lands where the replaced definition stands; a new definition follows the one that
precedes it in the overlay. Upstream's text stays as it is elsewhere, so that the
difference of the two files is what a reviewer has to read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from vllm_sparse_mla.edits import appended
from vllm_sparse_mla.export_patch import tree
from vllm_sparse_mla.export_patch.tidy import tidy
from vllm_sparse_mla.export_patch.tree import at_place_of, below_another, name_of
from vllm_sparse_mla.export_patch.unalias import Unalias
from vllm_sparse_mla.overlay import UPSTREAM_PREFIX


@dataclass(frozen=True)
class Rules:
    """What the text of an overlay file cannot say."""

    # For a method that calls the one that it replaces: the name that upstream's method
    # gets, by qualified name.
    wrapped: dict[str, str] = field(default_factory=dict)
    # Qualified names of upstream's definitions that nothing needs any more.
    removed: tuple[str, ...] = ()
    # Whether upstream formats the file as ruff does, with 88 columns.
    formatted: bool = True


@dataclass(frozen=True)
class Definition:
    """One definition in which upstream's file and the spliced one differ."""

    name: str  # qualified name
    kind: str  # ``new``, ``replaced``, ``wrapped``, ``removed`` or ``edited``


@dataclass(frozen=True)
class Spliced:
    """Upstream's file with the overlay's definitions."""

    text: str  # the file
    definitions: tuple[Definition, ...]  # what differs, in the overlay's order


def splice(
    overlay: str,
    upstream: str,
    rules: Rules | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Spliced:
    """Put the definitions of an overlay file that are wanted into upstream's file.

    Raises:
        ValueError: If the overlay holds a statement that has no place in upstream's
            file, calls a definition that it replaces, or imports a name that upstream
            uses for something else.
    """
    rules = rules or Rules()
    own, theirs = cst.parse_module(overlay), cst.parse_module(upstream)
    unalias = Unalias(own, theirs, rules.wrapped)
    splicer = _Splicer(rules, unalias, wanted)
    body = splicer.splice(own.visit(unalias).body, theirs.body)
    result = theirs.with_changes(body=splicer.without_removed(body))
    if tree.names(theirs.body) <= set(filter(wanted, tree.names(own.body))):
        result = _with_docstring(result, own.body[0])
    result = _with_imports(result, own)
    return Spliced(tidy(result.code, rules.formatted), tuple(splicer.definitions))


class _Splicer:
    def __init__(
        self, rules: Rules, unalias: Unalias, wanted: Callable[[str], bool]
    ) -> None:
        self._rules = rules
        self._unalias = unalias
        self._wanted = wanted
        self.definitions: list[Definition] = []

    def splice(
        self,
        own: Sequence[cst.CSTNode],
        theirs: Sequence[cst.CSTNode],
        prefix: str = "",
    ) -> list[cst.CSTNode]:
        """Upstream's body with the overlay's definitions."""
        body = list(theirs)
        seen: set[str] = set()
        above = -1  # where the predecessor of a new definition stands
        leading: list[cst.CSTNode] = []
        for node in own:
            if tree.is_unnamed(node):
                raise ValueError(
                    f"{prefix or 'the overlay'}: only definitions, assignments and "
                    f"imports can be exported, got {tree.code(node).strip()!r}"
                )
            name = name_of(node)
            if name is None:
                continue
            if name in seen:
                raise ValueError(f"{prefix or 'the overlay'} defines {name} twice")
            seen.add(name)
            wanted = self._wanted(prefix + name)
            old = next((n for n in body if name_of(n) == name), None)
            if old is None and not wanted:
                continue
            if old is None:
                self.definitions.append(Definition(prefix + name, "new"))
                if above < 0:
                    leading.append(node)
                else:
                    body.insert(above + 1, below_another(node))
                    above += 1
                continue
            start = body.index(old)
            new = [old]
            if not prefix and name in self._unalias.merged:
                inner = self.splice(node.body.body, old.body.body, f"{name}.")
                new = [old.with_deep_changes(old.body, body=inner)]
            elif wanted:
                new = self._replaced(node, old, prefix)
            if leading:
                new = self._above(leading, new[0]) + new[1:]
                leading = []
            body[start : start + 1] = new
            above = start + len(new) - 1
        for node in leading:
            if not body:
                raise ValueError(f"{prefix}: upstream's has no definition to follow")
            body.append(below_another(node))
        return body

    def _replaced(
        self, node: cst.CSTNode, old: cst.CSTNode, prefix: str
    ) -> list[cst.CSTNode]:
        name = prefix + name_of(node)
        new = at_place_of(old, node)
        if name in self._unalias.wrapping:
            self.definitions.append(Definition(name, "wrapped"))
            renamed = old.with_changes(name=cst.Name(self._rules.wrapped[name]))
            return self._above([node], renamed)
        if tree.code(new) != tree.code(old):
            self.definitions.append(Definition(name, "replaced"))
        return [new]

    @staticmethod
    def _above(new: Sequence[cst.CSTNode], old: cst.CSTNode) -> list[cst.CSTNode]:
        """New statements where an old one stood, and that one below them."""
        first, *others = new
        return [at_place_of(old, first), *map(below_another, [*others, old])]

    def without_removed(self, body: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
        """The body without what nothing needs any more."""
        body = list(body)
        for name in filter(self._wanted, self._rules.removed):
            owner, _, key = name.rpartition(".")
            place = next((n for n in body if owner and name_of(n) == owner), None)
            members = body if place is None else list(place.body.body)
            kept = [node for node in members if name_of(node) != key]
            if len(kept) == len(members):
                raise ValueError(f"{name} is to be removed, and upstream has none")
            self.definitions.append(Definition(name, "removed"))
            if place is None:
                body = kept
            else:
                smaller = place.with_deep_changes(place.body, body=kept)
                body[body.index(place)] = smaller
        return body


def _with_docstring(module: cst.Module, first: cst.CSTNode) -> cst.Module:
    """The file with the docstring of an overlay that defines all of it."""
    if not m.matches(first, tree.DOCSTRING):
        return module
    if m.matches(module.body[0], tree.DOCSTRING):
        return module.with_changes(body=[first, *module.body[1:]])
    header = [line for line in module.header if line.comment is not None]
    return module.with_changes(header=header, body=[first, *module.body])


def _with_imports(new: cst.Module, overlay: cst.Module) -> cst.Module:
    """The file with what its definitions import in the overlay."""
    used = {name.value for name in m.findall(new, m.Name())}
    present = {b.bound: b.target for b in tree.bindings(new)}
    added = []
    for binding in tree.bindings(overlay):
        if UPSTREAM_PREFIX in binding.target or binding.bound not in used:
            continue
        there = present.get(binding.bound)
        if there not in (None, binding.target):
            raise ValueError(
                f"{binding.bound} is {binding.target} in the overlay and {there} "
                "upstream"
            )
        if there is None:
            statement = cst.parse_statement(binding.statement)
            more = _with_member(new, binding.module, statement.body[0])
            if more is new:
                added.append(statement)
            new = more
    if not added:
        return new
    first = next(i for i, node in enumerate(new.body) if m.matches(node, tree.IMPORT))
    added[0] = at_place_of(new.body[first], added[0])
    below = new.body[first].with_changes(leading_lines=[])
    return new.with_changes(
        body=[*new.body[:first], *added, below, *new.body[first + 1 :]]
    )


def _with_member(
    module: cst.Module, origin: str, added: cst.Import | cst.ImportFrom
) -> cst.Module:
    """The file with a name more in its import from a module; itself if it has none."""
    for node in module.body:
        old = node.body[0] if m.matches(node, tree.IMPORT) else None
        if not (isinstance(old, cst.ImportFrom) and isinstance(added, cst.ImportFrom)):
            continue
        if tree.code(old.module) == origin:
            names = appended(old.names, *added.names)
            return module.deep_replace(old, old.with_changes(names=names))
    return module

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Puts the definitions of an overlay file into upstream's file, as text.

An overlay file replaces definitions one by one: a function or constant by another of
the same name, a method by one in a subclass of upstream's class. Here the same text
lands where the replaced definition stands; a new definition follows the one that
precedes it in the overlay. Upstream's text stays as it is elsewhere, so that the
difference of the two files is what a reviewer has to read.
"""

import ast
from dataclasses import dataclass, field

from vllm_sparse_mla.export_patch import source
from vllm_sparse_mla.export_patch.imports import merge_imports
from vllm_sparse_mla.export_patch.unalias import unalias


@dataclass(frozen=True)
class Rules:
    """What the text of an overlay file cannot say.

    Attributes:
        wrapped: For a method that calls the one that it replaces: the name that
            upstream's method gets, by qualified name.
        removed: Qualified names of upstream's definitions that nothing needs any more.
        width: Line width of upstream's file.
    """

    wrapped: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    width: int = 88


@dataclass(frozen=True)
class Definition:
    """One definition in which upstream's file and the spliced one differ.

    Attributes:
        name: Qualified name.
        kind: ``new``, ``replaced``, ``wrapped``, ``removed`` or ``edited``.
    """

    name: str
    kind: str


@dataclass(frozen=True)
class Spliced:
    """Upstream's file with the overlay's definitions.

    Attributes:
        text: The file.
        definitions: What differs, in the overlay's order.
    """

    text: str
    definitions: tuple[Definition, ...]


class _Splicer:
    def __init__(self, overlay: str, upstream: str, rules: Rules) -> None:
        self.rules = rules
        self.own = unalias(overlay, upstream, rules.wrapped)
        self.own_lines = self.own.text.split("\n")
        self.lines = upstream.split("\n")
        self.definitions: list[Definition] = []
        self._replaced: list[tuple[int, int, list[str]]] = []
        self._inserted: dict[int, list[str]] = {}

    def text(self) -> str:
        own, theirs = ast.parse(self.own.text), ast.parse("\n".join(self.lines))
        self._splice_body(own.body, theirs.body, prefix="")
        self._adopt_docstring(own.body, theirs.body)
        self._remove(theirs.body)
        changes = [*self._replaced, *((i, i, n) for i, n in self._inserted.items())]
        lines = list(self.lines)
        # From the bottom up. What is inserted at the end of a replaced range is
        # sorted before it, and so lands below it.
        for start, stop, new in sorted(changes, key=lambda c: (c[0], c[1]))[::-1]:
            lines[start:stop] = new
        return "\n".join(lines)

    def _splice_body(
        self, own_body: list[ast.stmt], their_body: list[ast.stmt], prefix: str
    ) -> None:
        where = prefix.rstrip(".") or "the overlay"
        stray = source.unnamed(own_body)
        if stray:
            raise ValueError(
                f"{where}, line {stray[0].lineno}: only definitions, assignments and "
                f"imports can be exported, got {ast.unparse(stray[0])!r}"
            )
        own = [
            item
            for item in source.items(self.own_lines, own_body, where)
            if prefix or item.key not in self.own.aliases
        ]
        theirs = {i.key: i for i in source.items(self.lines, their_body, where)}
        anchor: source.Item | None = None
        leading: list[source.Item] = []
        for item in own:
            if item.key in theirs:
                anchor = theirs[item.key]
                if leading:
                    self._insert_above(anchor, leading)
                    if anchor is next(iter(theirs.values())):
                        self._set_gap(anchor, max(1, leading[0].gap))
                    leading = []
                self._replace(item, anchor, prefix)
                continue
            self.definitions.append(Definition(prefix + item.key, "new"))
            if anchor is None:
                leading.append(item)
            else:
                self._insert_below(anchor, item)
        if leading:
            last = list(theirs.values())[-1] if theirs else None
            for item in leading:
                if last is None:
                    raise ValueError(f"{where}: upstream's has no definition to follow")
                self._insert_below(last, item)

    def _own_text(self, item: source.Item) -> list[str]:
        return self.own_lines[item.start : item.stop]

    def _replace(self, item: source.Item, old: source.Item, prefix: str) -> None:
        name = prefix + item.key
        if name in self.own.merged and not prefix:
            self._splice_body(item.node.body, old.node.body, prefix=f"{name}.")
            return
        new = self._own_text(item)
        if name in self.own.wrapping:
            self._wrap(item, old, self.rules.wrapped[name])
            self.definitions.append(Definition(name, "wrapped"))
        elif new != self.lines[old.start : old.stop]:
            self._replaced.append((old.start, old.stop, new))
            self.definitions.append(Definition(name, "replaced"))

    def _wrap(self, item: source.Item, old: source.Item, new_name: str) -> None:
        """Put the wrapper above upstream's method, which takes the new name."""
        self._insert_above(old, [item])
        row = old.node.lineno - 1
        head = self.lines[row].replace(f"def {old.key}(", f"def {new_name}(")
        self._replaced.append((row, row + 1, [head]))

    def _insert_above(self, old: source.Item, new: list[source.Item]) -> None:
        text: list[str] = []
        gaps = [item.gap for item in new[1:]] + [max(old.gap, self._gap(new[-1]))]
        for item, gap in zip(new, gaps, strict=True):
            text += [*self._own_text(item), *[""] * gap]
        self._inserted[old.start] = self._inserted.get(old.start, []) + text

    def _insert_below(self, old: source.Item, item: source.Item) -> None:
        gap = max(item.gap, self._gap(item) if old.is_definition else 0)
        text = self._inserted.setdefault(old.stop, [])
        text += [*[""] * gap, *self._own_text(item)]

    def _set_gap(self, old: source.Item, gap: int) -> None:
        self._replaced.append((old.start - old.gap, old.start, [""] * gap))

    @staticmethod
    def _gap(item: source.Item) -> int:
        """Blank lines that a definition needs around itself."""
        if not item.is_definition:
            return 0
        return 1 if item.node.col_offset else 2

    def _adopt_docstring(self, own: list[ast.stmt], theirs: list[ast.stmt]) -> None:
        """Take the overlay's docstring for a file of which it defines everything."""
        covered = source.keys(theirs) <= source.keys(own)
        if not (covered and source.is_docstring(own[0])):
            return
        new = self.own_lines[own[0].lineno - 1 : own[0].end_lineno]
        if source.is_docstring(theirs[0]):
            self._replaced.append((theirs[0].lineno - 1, theirs[0].end_lineno, new))
        else:
            row = source.first_line(self.lines, theirs[0])
            while row and not self.lines[row - 1].strip():
                row -= 1
            self._inserted[row] = new + self._inserted.get(row, [])

    def _remove(self, body: list[ast.stmt]) -> None:
        classes = {n.name: n.body for n in body if isinstance(n, ast.ClassDef)}
        for name in self.rules.removed:
            owner, _, key = name.rpartition(".")
            where = classes.get(owner, []) if owner else body
            found = [i for i in source.items(self.lines, where, owner) if i.key == key]
            if not found:
                raise ValueError(f"{name} is to be removed, and upstream has none")
            old = found[0]
            self._replaced.append((old.start - old.gap, old.stop, []))
            self.definitions.append(Definition(name, "removed"))


def splice(overlay: str, upstream: str, rules: Rules | None = None) -> Spliced:
    """Put an overlay file's definitions into upstream's file.

    Args:
        overlay: Text of the overlay file.
        upstream: Text of upstream's file.
        rules: What the overlay file cannot say by itself.

    Returns:
        The new file and the definitions in which it differs.

    Raises:
        ValueError: If the overlay holds a statement that has no place in upstream's
            file, calls a definition that it replaces, or imports a name that upstream
            uses for something else.
    """
    rules = rules or Rules()
    splicer = _Splicer(overlay, upstream, rules)
    text = splicer.text()
    text = merge_imports(text, list(splicer.own.imports), upstream, rules.width)
    return Spliced(text, tuple(splicer.definitions))

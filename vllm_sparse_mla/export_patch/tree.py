# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Named statements of a syntax tree, their comments and gaps, and imports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

DOCSTRING = m.SimpleStatementLine([m.Expr(m.SimpleString())])
IMPORT = m.SimpleStatementLine([m.Import() | m.ImportFrom()])
TYPE_CHECKING = m.If(test=m.Name("TYPE_CHECKING"))
_PASS = m.SimpleStatementLine([m.Pass()])
_ACCESSOR = m.Attribute(attr=m.Name("setter") | m.Name("deleter"))


def code(node: cst.CSTNode) -> str:
    """Source of a node."""
    return cst.Module([]).code_for_node(node)


def name_of(node: cst.CSTNode) -> str | None:
    """Name of a statement within its body, None if it has none.

    ``f``, ``f.__vec_size__`` for an attribute that is set after a function,
    ``p.setter`` for a property's setter.
    """
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        for decorator in node.decorators:
            if m.matches(decorator.decorator, _ACCESSOR):
                return f"{node.name.value}.{decorator.decorator.attr.value}"
        return node.name.value
    if m.matches(node, m.SimpleStatementLine([m.Assign([m.DoNotCare()])])):
        return code(node.body[0].targets[0].target)
    if m.matches(node, m.SimpleStatementLine([m.AnnAssign()])):
        return code(node.body[0].target)
    return None


def names(body: Sequence[cst.CSTNode]) -> set[str]:
    """Names of the named statements of a body."""
    return {name for node in body if (name := name_of(node)) is not None}


def is_unnamed(node: cst.CSTNode) -> bool:
    """Whether a splice has no place for a statement."""
    other = DOCSTRING | IMPORT | TYPE_CHECKING | _PASS
    return name_of(node) is None and not m.matches(node, other)


def _place_and_comments(
    node: cst.CSTNode,
) -> tuple[list[cst.EmptyLine], list[cst.EmptyLine]]:
    """The lines above a statement: its place, and comments that adjoin it."""
    place, comments = list(node.leading_lines), []
    while place and place[-1].comment is not None:
        comments.insert(0, place.pop())
    return place, comments


def at_place_of(old: cst.CSTNode, new: cst.CSTNode) -> cst.CSTNode:
    """A statement below what stands above another, with its own comments."""
    place, _ = _place_and_comments(old)
    _, comments = _place_and_comments(new)
    return new.with_changes(leading_lines=[*place, *comments])


def below_another(node: cst.CSTNode) -> cst.CSTNode:
    """A statement with its own comments and the blank lines above them."""
    place, comments = _place_and_comments(node)
    while any(line.comment for line in place):
        place.pop(0)
    return node.with_changes(leading_lines=[*place, *comments])


@dataclass(frozen=True)
class Binding:
    """A name bound by an import."""

    module: str  # module of ``from module import name``, or what ``import`` names
    name: str | None  # what is imported from it; None for ``import module``
    asname: str | None  # the name given by ``as``

    @property
    def bound(self) -> str:
        """The name that the file sees."""
        return self.asname or self.name or self.module.split(".")[0]

    @property
    def target(self) -> str:
        """What the name stands for, however it was imported."""
        if self.name is None:
            return self.module if self.asname else self.module.split(".")[0]
        module = "typing" if self.module == "collections.abc" else self.module
        return f"{module}.{self.name}"

    @property
    def statement(self) -> str:
        """The import by itself."""
        alias = f" as {self.asname}" if self.asname else ""
        if self.name is None:
            return f"import {self.module}{alias}"
        return f"from {self.module} import {self.name}{alias}"


def bindings(tree: cst.Module) -> Iterator[Binding]:
    """Names bound by a file's top-level imports, guarded by TYPE_CHECKING or not.

    Raises:
        ValueError: If an import is relative.
    """
    for node in tree.body:
        if m.matches(node, IMPORT | TYPE_CHECKING):
            for statement in m.findall(node, m.Import() | m.ImportFrom()):
                yield from bindings_of(statement)


def bindings_of(statement: cst.Import | cst.ImportFrom) -> Iterator[Binding]:
    """Names bound by an import.

    Raises:
        ValueError: If it is relative.
    """
    origin = getattr(statement, "module", None)
    if getattr(statement, "relative", ()):
        raise ValueError(f"{code(statement)!r} is relative: it has no export")
    for alias in statement.names:
        asname = alias.evaluated_alias
        if origin is None:
            yield Binding(alias.evaluated_name, None, asname)
        else:
            yield Binding(code(origin), alias.evaluated_name, asname)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Source text as a list of named statements with their exact line ranges."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One named statement of a module or class body.

    Attributes:
        key: Name within its body: ``f``, ``f.__vec_size__`` for an attribute set
            after a function, ``p.setter`` for a property's setter.
        node: The statement.
        start: First line, 0-based, decorators and adjoining comments included.
        stop: One past the last line.
        gap: Blank lines above ``start``.
    """

    key: str
    node: ast.stmt
    start: int
    stop: int
    gap: int

    @property
    def is_definition(self) -> bool:
        return isinstance(
            self.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        )


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a bare string."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_type_checking(node: ast.stmt) -> bool:
    """Whether a statement is an ``if TYPE_CHECKING:`` block."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def is_import(node: ast.stmt) -> bool:
    """Whether a statement is an import, guarded by ``TYPE_CHECKING`` or not."""
    return isinstance(node, (ast.Import, ast.ImportFrom)) or is_type_checking(node)


def _key(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Attribute) and decorator.attr in (
                "setter",
                "deleter",
            ):
                return f"{node.name}.{decorator.attr}"
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return None


def first_line(lines: list[str], node: ast.stmt) -> int:
    """First line (0-based) of a statement, its decorators and adjoining comments."""
    decorators = getattr(node, "decorator_list", [])
    start = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    indent = " " * node.col_offset
    while start > 0 and re.match(rf"{indent}#", lines[start - 1]):
        start -= 1
    return start


def blank_lines_above(lines: list[str], start: int) -> int:
    """Number of blank lines directly above a line."""
    count = 0
    while count < start and not lines[start - 1 - count].strip():
        count += 1
    return count


def items(lines: list[str], body: list[ast.stmt], where: str) -> list[Item]:
    """Named statements of a body, in order; imports and docstrings are left out.

    Args:
        lines: The whole file's lines, without line ends.
        body: Statements of the module or of one class.
        where: What to call the body in an error.

    Raises:
        ValueError: If two statements share a name.
    """
    found: dict[str, Item] = {}
    for node in body:
        key = _key(node)
        if key is None:
            continue
        if key in found:
            raise ValueError(f"{where} defines {key} twice (line {node.lineno})")
        start = first_line(lines, node)
        gap = blank_lines_above(lines, start)
        found[key] = Item(key, node, start, node.end_lineno or node.lineno, gap)
    return list(found.values())


def keys(body: list[ast.stmt]) -> set[str]:
    """Names of the named statements of a body."""
    return {key for node in body if (key := _key(node)) is not None}


def unnamed(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that no splice can place: neither named, import nor docstring."""
    return [
        node
        for node in body
        if _key(node) is None
        and not is_import(node)
        and not is_docstring(node)
        and not isinstance(node, ast.Pass)
    ]


def drop_lines(lines: list[str], start: int, stop: int) -> list[str]:
    """Lines without a range, and without the second of two gaps that then meet."""
    above = blank_lines_above(lines, start)
    if above and stop < len(lines) and not lines[stop].strip():
        start -= above
    return lines[:start] + lines[stop:]


def used_names(text: str) -> set[str]:
    """Every name that the code of a file reads, quoted annotations included."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        for node in ast.walk(pending.pop()):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(node.id)
            annotation = getattr(node, "annotation", None) or getattr(
                node, "returns", None
            )
            if isinstance(annotation, ast.AST):
                for part in ast.walk(annotation):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        pending.append(ast.parse(part.value, mode="eval"))
    return names


@dataclass(frozen=True, order=True)
class Edit:
    """New text for a range of a file, given by ``(line, byte column)`` as ast counts.

    Attributes:
        start: First position.
        stop: One past the last position.
        new: Text to put there.
    """

    start: tuple[int, int]
    stop: tuple[int, int]
    new: str

    @classmethod
    def of(cls, node: ast.expr, new: str) -> "Edit":
        """Replace an expression."""
        return cls(start(node), end(node), new)


def start(node: ast.expr | ast.keyword) -> tuple[int, int]:
    """Position at which an expression begins."""
    return node.lineno, node.col_offset


def end(node: ast.expr | ast.keyword) -> tuple[int, int]:
    """Position at which an expression ends."""
    return node.end_lineno, node.end_col_offset


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits that do not overlap."""
    data = text.encode()
    lines = [0]
    for line in data.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for e in sorted(edits, reverse=True):
        first, last = (lines[row - 1] + column for row, column in (e.start, e.stop))
        data = data[:first] + e.new.encode() + data[last:]
    return data.decode()

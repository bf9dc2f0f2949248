# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merging of import statements, in the order that ruff's isort rules ask for."""

import ast
import sys
from dataclasses import dataclass

from vllm_sparse_mla.export_patch.source import (
    drop_lines,
    is_docstring,
    is_type_checking,
    used_names,
)

FIRST_PARTY = ("flash_attn", "tests", "vllm", "vllm_sparse_mla")


@dataclass(frozen=True)
class Binding:
    """One name bound by an import.

    Attributes:
        module: Module of ``from module import name``; None for ``import name``.
        name: What is imported.
        asname: The name given by ``as``.
        guarded: Whether it stands under ``if TYPE_CHECKING:``.
    """

    module: str | None
    name: str
    asname: str | None = None
    guarded: bool = False

    @property
    def bound(self) -> str:
        """The name that the file sees."""
        return self.asname or (self.name if self.module else self.name.split(".")[0])

    @property
    def target(self) -> str:
        """What the name stands for, however it was imported."""
        if self.module is None:
            return self.name if self.asname else self.name.split(".")[0]
        module = "typing" if self.module == "collections.abc" else self.module
        return f"{module}.{self.name}"


def bindings(text: str) -> list[Binding]:
    """Names bound by a file's top-level imports.

    Raises:
        ValueError: If an import is relative.
    """
    found = []
    for guarded, node in _statements(ast.parse(text)):
        for alias in node.names:
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if isinstance(node, ast.ImportFrom) and node.level:
                raise ValueError(
                    f"line {node.lineno}: relative imports cannot be exported"
                )
            found.append(Binding(module, alias.name, alias.asname, guarded))
    return found


def _statements(tree: ast.Module) -> list[tuple[bool, ast.Import | ast.ImportFrom]]:
    found = []
    for node in tree.body:
        guarded = is_type_checking(node)
        for child in node.body if guarded else [node]:
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found.append((guarded, child))
    return found


def _section(module: str) -> int:
    root = module.split(".")[0]
    if root == "__future__":
        return 0
    if root in sys.stdlib_module_names:
        return 1
    return 3 if root in FIRST_PARTY else 2


def _order(node: ast.Import | ast.ImportFrom) -> tuple[int, int, str]:
    if isinstance(node, ast.Import):
        return _section(node.names[0].name), 0, node.names[0].name.lower()
    return _section(node.module), 1, node.module.lower()


def _member_order(alias: ast.alias) -> tuple[int, str]:
    name = alias.name
    if len(name) > 1 and name.isupper():
        return 0, name.lower()
    return (1 if name[0].isupper() else 2), name.lower()


def _render(
    node: ast.Import | ast.ImportFrom, indent: str, width: int, exploded: bool
) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        node.names.sort(key=_member_order)
    line = indent + ast.unparse(node)
    if len(line) <= width and not exploded:
        return [line]
    names = [f"{indent}    {ast.unparse(alias)}," for alias in node.names]
    return [f"{indent}from {node.module} import (", *names, f"{indent})"]


class ImportEditor:
    """Adds and removes imports of one file.

    Args:
        text: Source.
        width: Line width.
    """

    def __init__(self, text: str, width: int) -> None:
        self.text = text
        self.width = width

    def _replace(self, start: int, stop: int, new: list[str]) -> None:
        lines = self.text.split("\n")
        lines[start:stop] = new
        self.text = "\n".join(lines)

    def _rerender(self, node: ast.Import | ast.ImportFrom, exploded: bool) -> None:
        lines = self.text.split("\n")
        if any("#" in line for line in lines[node.lineno - 1 : node.end_lineno]):
            raise ValueError(f"import with a comment in line {node.lineno}")
        indent = " " * node.col_offset
        new = _render(node, indent, self.width, exploded)
        self._replace(node.lineno - 1, node.end_lineno, new)

    def remove(self, binding: Binding) -> None:
        """Remove one binding that ``bindings`` has listed."""
        for guarded, node in _statements(ast.parse(self.text)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module != binding.module or guarded != binding.guarded:
                continue
            kept = [a for a in node.names if (a.name, a.asname) != _pair(binding)]
            if len(kept) == len(node.names):
                continue
            if kept:
                node.names = kept
                self._rerender(node, exploded=False)
            else:
                self._drop(self._emptied_guard(node) or node)
            return

    def _emptied_guard(self, node: ast.Import | ast.ImportFrom) -> ast.stmt | None:
        """The ``if TYPE_CHECKING:`` block of which a statement is the only one."""
        for block in ast.parse(self.text).body:
            if is_type_checking(block) and [b.lineno for b in block.body] == [
                node.lineno
            ]:
                return block
        return None

    def _drop(self, node: ast.stmt) -> None:
        lines = drop_lines(self.text.split("\n"), node.lineno - 1, node.end_lineno)
        self.text = "\n".join(lines)

    def add(self, binding: Binding) -> None:
        """Add one binding, to a statement of the same module if there is one."""
        found = [
            node
            for guarded, node in _statements(ast.parse(self.text))
            if guarded == binding.guarded
        ]
        alias = ast.alias(binding.name, binding.asname)
        for node in found:
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == binding.module
                and not binding.asname
                and not any(a.asname for a in node.names)
            ):
                node.names.append(alias)
                self._rerender(node, exploded=node.lineno != node.end_lineno)
                return
        if binding.module:
            new = ast.ImportFrom(binding.module, [alias], 0)
        else:
            new = ast.Import([alias])
        if binding.guarded and not found:
            self._open_guard()
            position, above, below = self._guard_body_start(), [], []
            indent = "    "
        else:
            indent = "    " if binding.guarded else ""
            position, above, below = self._place(new, found)
        rendered = _render(new, indent, self.width, exploded=False)
        self._replace(position, position, [*above, *rendered, *below])

    def _place(
        self,
        new: ast.Import | ast.ImportFrom,
        found: list[ast.Import | ast.ImportFrom],
    ) -> tuple[int, list[str], list[str]]:
        """Line to insert at, and the blank lines to put above and below."""
        order = _order(new)
        peers = [node for node in found if _order(node)[0] == order[0]]
        later = [node for node in peers if _order(node) > order]
        if later:
            return later[0].lineno - 1, [], []
        if peers:
            return peers[-1].end_lineno, [], []
        earlier = [node for node in found if _order(node)[0] < order[0]]
        if earlier:
            return earlier[-1].end_lineno, [""], []
        if found:
            return found[0].lineno - 1, [], [""]
        body = ast.parse(self.text).body
        if body and is_docstring(body[0]):
            return body[0].end_lineno, [""], []
        start = body[0].lineno - 1 if body else 0
        return start, [], ["", ""]

    def _open_guard(self) -> None:
        guard = Binding("typing", "TYPE_CHECKING")
        if "TYPE_CHECKING" not in [b.bound for b in bindings(self.text)]:
            self.add(guard)
        if any(is_type_checking(node) for node in ast.parse(self.text).body):
            return
        last = _statements(ast.parse(self.text))[-1][1].end_lineno
        self._replace(last, last, ["", "if TYPE_CHECKING:"])

    def _guard_body_start(self) -> int:
        return self.text.split("\n").index("if TYPE_CHECKING:") + 1


def _pair(binding: Binding) -> tuple[str, str | None]:
    return binding.name, binding.asname


def merge_imports(text: str, wanted: list[Binding], before: str, width: int) -> str:
    """Give a spliced file the imports that it needs and no other.

    Args:
        text: The spliced file with upstream's imports.
        wanted: What the overlay imports.
        before: Upstream's file: what it imports without using it stays.
        width: Line width.

    Raises:
        ValueError: If upstream binds a wanted name to something else.
    """
    used = used_names(text)
    editor = ImportEditor(text, width)
    present = {b.bound: b for b in bindings(text)}
    for binding in wanted:
        if binding.bound not in used:
            continue
        old = present.get(binding.bound)
        if old is not None and old.target != binding.target:
            raise ValueError(
                f"{binding.bound} is {binding.target} in the overlay and {old.target} "
                "upstream"
            )
        if old is None or (old.guarded and not binding.guarded):
            if old is not None:
                editor.remove(old)
            editor.add(binding)
            present[binding.bound] = binding
    return drop_unused_imports(editor.text, before, width)


def drop_unused_imports(text: str, before: str, width: int) -> str:
    """Drop the imports that ``before`` used and ``text`` does not."""
    editor = ImportEditor(text, width)
    used_before = used_names(before)
    for binding in sorted(bindings(before), key=lambda b: not b.guarded):
        # Read anew each time: TYPE_CHECKING goes with the last guarded import.
        if binding.bound in used_before and binding.bound not in used_names(
            editor.text
        ):
            editor.remove(binding)
    return editor.text

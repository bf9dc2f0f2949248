# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Frees an overlay file from the name under which it sees upstream's module.

An overlay file imports the module that it replaces as ``_upstream_<name>``. In
upstream's own file those names are its neighbours: ``_upstream.f`` becomes ``f``. What
would then call itself is refused here.
"""

import ast
from dataclasses import dataclass

from vllm_sparse_mla.export_patch.imports import Binding, bindings
from vllm_sparse_mla.export_patch.source import Edit, apply_edits, keys, start


@dataclass(frozen=True)
class Unaliased:
    """An overlay file as upstream would write it.

    Attributes:
        text: The file.
        merged: Names of the classes whose bodies belong into upstream's class.
        aliases: Names that only stood for upstream's.
        imports: What the file imports, upstream's own module left out.
        wrapping: Qualified names of methods that call the one that they replace.
    """

    text: str
    merged: frozenset[str]
    aliases: frozenset[str]
    imports: tuple[Binding, ...]
    wrapping: frozenset[str]


def _is_upstream_module(binding: Binding) -> bool:
    return binding.name.split(".")[-1].startswith("_upstream_")


def _imported_from_upstream(binding: Binding) -> bool:
    return (binding.module or "").split(".")[-1].startswith("_upstream_")


class _Rewriter(ast.NodeVisitor):
    def __init__(
        self, text: str, upstream: ast.Module, wrapped: dict[str, str]
    ) -> None:
        tree = ast.parse(text)
        self._wrapped = wrapped
        imported = bindings(text)
        self._modules = {b.bound for b in imported if _is_upstream_module(b)}
        self.aliases = {b.bound: b.name for b in imported if _imported_from_upstream(b)}
        for node in tree.body:
            name = self._aliased(node)
            if name:
                self.aliases[node.targets[0].id] = name
        self._own = keys(tree.body) - set(self.aliases)
        self._upstream_bodies = {
            node.name: keys(node.body)
            for node in upstream.body
            if isinstance(node, ast.ClassDef)
        }
        self.merged: dict[str, set[str]] = {}
        self._class: ast.ClassDef | None = None
        self._method = ""
        self.wrapping: set[str] = set()
        self.edits: list[Edit] = []
        for node in tree.body:
            if self._aliased(node) is None:
                self.visit(node)

    def _aliased(self, node: ast.stmt) -> str | None:
        """Upstream's name in a statement that only gives it another."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return self._upstream_name(node.value)
        return None

    def _upstream_name(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if node.value.id in self._modules else None
        return self.aliases.get(node.id) if isinstance(node, ast.Name) else None

    def _refuse(self, node: ast.AST, what: str) -> None:
        raise ValueError(
            f"line {node.lineno}: {what} is called by the overlay that replaces it; in "
            "upstream's file that would be the overlay's own definition"
        )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(self._upstream_name(base) == node.name for base in node.bases):
            self.merged[node.name] = keys(node.body)
            self._class = node
            for child in [*node.decorator_list, *node.body]:
                self._method = getattr(child, "name", "")
                self.visit(child)
            self._class, self._method = None, ""
            # The bases go with upstream's class; rewritten only to stay valid code.
            self.edits += [
                Edit.of(base, node.name)
                for base in node.bases
                if self._upstream_name(base) == node.name
            ]
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        owner = getattr(function, "value", None)
        name = self._upstream_name(owner) if owner is not None else None
        if name in self.merged and function.attr in self.merged[name]:
            qualified = f"{name}.{function.attr}"
            in_itself = self._class is not None and (
                (self._class.name, self._method) == (name, function.attr)
            )
            if not in_itself or qualified not in self._wrapped or len(node.args) < 2:
                self._refuse(node, qualified)
            self.wrapping.add(qualified)
            new = f"{ast.unparse(node.args[0])}.{self._wrapped[qualified]}"
            self.edits.append(Edit.of(function, new))
            self.edits.append(Edit(start(node.args[0]), start(node.args[1]), ""))
            for argument in [*node.args[1:], *(k.value for k in node.keywords)]:
                self.visit(argument)
            return
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Call):
            call = node.value
            is_super = isinstance(call.func, ast.Name) and call.func.id == "super"
            if is_super and self._class is not None:
                skips = bool(call.args) and (
                    self._upstream_name(call.args[0]) == self._class.name
                )
                known = self._upstream_bodies.get(self._class.name, set())
                if not skips and node.attr in known:
                    self._refuse(node, f"{self._class.name}.{node.attr}")
                if call.args:
                    self.edits.append(Edit.of(call, "super()"))
                return
        name = self._upstream_name(node)
        if name is not None:
            self._take(node, name)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        name = self.aliases.get(node.id)
        if name is not None and isinstance(node.ctx, ast.Load):
            self._take(node, name)

    def _take(self, node: ast.expr, name: str) -> None:
        if name in self._own and name not in self.merged:
            self._refuse(node, name)
        self.edits.append(Edit.of(node, name))


def unalias(text: str, upstream: str, wrapped: dict[str, str]) -> Unaliased:
    """Rewrite an overlay file in upstream's own names.

    Args:
        text: The overlay file.
        upstream: Upstream's file.
        wrapped: For a method that calls the one that it replaces: the name that
            upstream's method gets, by qualified name.

    Raises:
        ValueError: If a definition calls the one that it replaces, other than a
            method in ``wrapped`` as ``_upstream.Class.method(self, argument, ...)``.
    """
    rewriter = _Rewriter(text, ast.parse(upstream), wrapped)
    return Unaliased(
        text=apply_edits(text, rewriter.edits),
        merged=frozenset(rewriter.merged),
        aliases=frozenset(rewriter.aliases),
        imports=tuple(
            b
            for b in bindings(text)
            if not _is_upstream_module(b) and not _imported_from_upstream(b)
        ),
        wrapping=frozenset(rewriter.wrapping),
    )

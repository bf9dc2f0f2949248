# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Frees an overlay file from the name under which it sees upstream's module.

An overlay file imports the module that it replaces as ``_upstream_<name>``. In
upstream's own file those names are its neighbours: ``_upstream.f`` becomes ``f``. What
would then call itself is refused here.
"""

from collections.abc import Mapping

import libcst as cst
import libcst.matchers as m

from vllm_sparse_mla.export_patch.tree import bindings, code, name_of, names
from vllm_sparse_mla.overlay import UPSTREAM_PREFIX

_SUPER = m.Call(m.Name("super"))


class Unalias(cst.CSTTransformer):
    """Rewrites an overlay file in upstream's own names.

    Attributes:
        merged: By class whose body belongs into upstream's class: names of the body.
        wrapping: Qualified names of methods that call the one that they replace.
    """

    def __init__(
        self, overlay: cst.Module, upstream: cst.Module, wrapped: Mapping[str, str]
    ) -> None:
        """Reads both files; for ``wrapped`` see ``Rules``."""
        super().__init__()
        self._wrapped = wrapped
        self._modules = {
            b.bound for b in bindings(overlay) if UPSTREAM_PREFIX in b.target
        }
        self._aliases: dict[str, str] = {}
        for node in overlay.body:
            if m.matches(node, m.SimpleStatementLine([m.Assign()])):
                name = self._upstreams(node.body[0].value)
                if name is not None:
                    self._aliases[name_of(node)] = name
        self._own = names(overlay.body)
        self._theirs = {
            node.name.value: names(node.body.body)
            for node in upstream.body
            if isinstance(node, cst.ClassDef)
        }
        self.merged: dict[str, set[str]] = {
            node.name.value: names(node.body.body)
            for node in overlay.body
            if isinstance(node, cst.ClassDef)
            and node.name.value in [self._upstreams(base.value) for base in node.bases]
        }
        self.wrapping: set[str] = set()
        self._inside: list[str] = []

    def _upstreams(self, node: cst.CSTNode) -> str | None:
        """Upstream's name for an expression, if it is one of upstream's names."""
        if isinstance(node, cst.Subscript):
            node = node.value
        if m.matches(node, m.Attribute(m.Name())):
            return node.attr.value if node.value.value in self._modules else None
        return self._aliases.get(node.value) if isinstance(node, cst.Name) else None

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{'.'.join(self._inside)}: {what} is called by the overlay that replaces "
            "it; in upstream's file that would be the overlay's own definition"
        )

    def leave_Module(self, old: cst.Module, new: cst.Module) -> cst.Module:
        """Leaves out the statements that only gave upstream's names others."""
        kept = [
            n for n, o in zip(new.body, old.body) if name_of(o) not in self._aliases
        ]
        return new.with_changes(body=kept)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._inside.append(node.name.value)

    def leave_ClassDef(self, old: cst.ClassDef, new: cst.ClassDef) -> cst.ClassDef:
        self._inside.pop()
        return new

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._inside.append(node.name.value)

    def leave_FunctionDef(
        self, old: cst.FunctionDef, new: cst.FunctionDef
    ) -> cst.FunctionDef:
        self._inside.pop()
        return new

    def leave_Call(self, old: cst.Call, new: cst.Call) -> cst.Call:
        if not isinstance(old.func, cst.Attribute):
            return new
        owner, method = self._upstreams(old.func.value), old.func.attr.value
        if method not in self.merged.get(owner, ()):
            return new
        name = f"{owner}.{method}"
        if name not in self._wrapped or self._inside[:2] != [owner, method]:
            self._refuse(name)
        self.wrapping.add(name)
        myself, *arguments = new.args
        renamed = cst.Attribute(myself.value, cst.Name(self._wrapped[name]))
        return new.with_changes(func=renamed, args=arguments)

    def leave_Attribute(
        self, old: cst.Attribute, new: cst.Attribute
    ) -> cst.BaseExpression:
        name = self._upstreams(old)
        if name is not None:
            return self._take(name)
        cls = self._inside[0] if self._inside else None
        if cls in self.merged and m.matches(old.value, _SUPER):
            past = [self._upstreams(argument.value) for argument in old.value.args]
            if cls in past:
                return new.with_changes(value=cst.Call(cst.Name("super")))
            if old.attr.value in self._theirs.get(cls, ()):
                self._refuse(f"{cls}.{code(old.attr)}")
        return new

    def leave_Name(self, old: cst.Name, new: cst.Name) -> cst.Name:
        name = self._aliases.get(old.value)
        return new if name is None else self._take(name)

    def _take(self, name: str) -> cst.Name:
        if name in self._own - self.merged.keys():
            self._refuse(name)
        return cst.Name(name)

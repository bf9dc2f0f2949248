# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A test file as upstream would have it: its imports, its markers."""

from collections import Counter
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from vllm_sparse_mla.export_patch import tree
from vllm_sparse_mla.export_patch.tidy import tidy

UPSTREAM_PACKAGE = "tests.v1.attention.sparse_mla"
# Modules of this package that the tests import: they travel with them.
SHARED_MODULES = (
    "host_callbacks",
    "kv_cache",
    "layer",
    "masks",
    "reference",
    "served",
    "stand_ins",
    "world",
)
_OWN_PACKAGE = "vllm_sparse_mla"
_TESTING = f"{_OWN_PACKAGE}.testing"


def _mark(name: str) -> m.Attribute:
    return m.Attribute(m.Attribute(m.Name("pytest"), m.Name("mark")), m.Name(name))


# A marker to which this repository's own conftest gives a meaning, which a tree that is
# patched does not need to know.
_DROPPED = _mark("stock_fails") | m.Call(_mark("stock_fails"))
#: Upstream's marker for what ``grid`` marks here.
GRID = "slow_test"
_GPU, _GRID = _mark("gpu"), _mark("grid")
_GPU_NAME = "requires_nvidia"
_GPU_CONDITION = f"""

{_GPU_NAME} = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)
"""


@dataclass(frozen=True)
class PortedTest:
    """A test file as upstream would have it."""

    text: str | None  # the file; None if all of it is about this package
    # Names of test functions that are about this package.
    left_out: tuple[str, ...] = ()


def port_test(text: str) -> PortedTest:
    """Rewrite a test file for upstream's repository.

    Shared modules are imported from their places among upstream's tests. Markers that
    only this repository knows are left out where they are decorators, in
    ``pytestmark``, or marks of a ``pytest.param``; elsewhere they stay, and mark
    nothing. What exists for the plugin is left out too: a file that imports another
    module of this package, a function that names it.
    """
    before = cst.parse_module(text)
    own = {b for b in tree.bindings(before) if b.target.startswith(_OWN_PACKAGE)}
    if any(_shared_module(binding) is None for binding in own):
        return PortedTest(None)
    body, left_out = [], []
    for node in before.body:
        if isinstance(node, cst.FunctionDef) and _OWN_PACKAGE in tree.code(node):
            left_out.append(node.name.value)
        else:
            body.append(node)
    port = _Port()
    after = before.with_changes(body=body).visit(port)
    if port.needs_gpu:
        after = _with_gpu_condition(after)
    after = _without_unused_constants(after, before)
    return PortedTest(tidy(after.code), tuple(left_out))


def upstream_module(name: str) -> str:
    """The name among upstream's tests of one of ``SHARED_MODULES``."""
    return f"{UPSTREAM_PACKAGE}.sparse_mla_{name}"


def _shared_module(binding: tree.Binding) -> str | None:
    """Which shared module an import is of or from; None for anything else."""
    for name in SHARED_MODULES:
        if f"{_TESTING}.{name}" in (binding.module, binding.target):
            return name
    return None


class _Port(cst.CSTTransformer):
    """Rewrites markers and imports.

    Its methods match by themselves: matchers as decorators are tried on every node.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needs_gpu = False

    def leave_Decorator(self, old: cst.Decorator, new: cst.Decorator):
        if m.matches(old.decorator, _DROPPED):
            return cst.RemoveFromParent()
        return new

    def leave_Call(self, old: cst.Call, new: cst.Call):
        if not m.matches(old.func, _PARAM):
            return new
        marks = m.Arg(_DROPPED, keyword=m.Name("marks"))
        kept = [argument for argument in new.args if not m.matches(argument, marks)]
        if len(kept) < len(new.args):
            kept[-1] = kept[-1].with_changes(comma=new.args[-1].comma)
        return new.with_changes(args=kept)

    def leave_SimpleStatementLine(self, old: cst.CSTNode, new: cst.CSTNode):
        if not m.matches(old, _PYTESTMARK):
            return new
        value = new.body[0].value
        marks = value.elements if isinstance(value, cst.List) else [value]
        kept = [mark for mark in marks if not m.matches(mark, _DROPPED_OR_ELEMENT)]
        if not kept:
            return cst.RemoveFromParent()
        if len(kept) == len(marks):
            return new
        return new.with_deep_changes(value, elements=kept)

    def leave_Attribute(self, old: cst.Attribute, new: cst.Attribute):
        if m.matches(old, _GPU):
            self.needs_gpu = True
            return cst.Name(_GPU_NAME)
        if m.matches(old, _GRID):
            return new.with_changes(attr=cst.Name(GRID))
        return new

    def leave_ImportFrom(self, old: cst.ImportFrom, new: cst.ImportFrom):
        module = tree.code(old.module)
        if module == _TESTING:
            aliases = []
            for alias in old.names:
                name = cst.Name(f"sparse_mla_{alias.evaluated_name}")
                bound = alias.evaluated_alias or alias.evaluated_name
                asname = cst.AsName(cst.Name(bound))
                aliases.append(cst.ImportAlias(name, asname))
            module = cst.parse_expression(UPSTREAM_PACKAGE)
            return new.with_changes(module=module, names=aliases)
        name = module.removeprefix(f"{_TESTING}.")
        if name in SHARED_MODULES and module != name:
            return new.with_changes(module=cst.parse_expression(upstream_module(name)))
        return new


_DROPPED_OR_ELEMENT = _DROPPED | m.Element(_DROPPED)
_PARAM = m.Attribute(m.Name("pytest"), m.Name("param"))
_PYTESTMARK = m.SimpleStatementLine([m.Assign([m.AssignTarget(m.Name("pytestmark"))])])


def _with_gpu_condition(module: cst.Module) -> cst.Module:
    bound = {binding.bound for binding in tree.bindings(module)}
    text = "" if "torch" in bound else "import torch\n"
    new = cst.parse_module(text + _GPU_CONDITION)
    body = list(module.body)
    imports = tree.IMPORT | tree.TYPE_CHECKING
    last = max(i for i, node in enumerate(body) if m.matches(node, imports))
    body[last + 1 : last + 1] = new.body
    return module.with_changes(body=body)


class _Names(cst.CSTVisitor):
    """Counts names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def visit_Name(self, node: cst.Name) -> None:
        self.counts[node.value] += 1


def _without_unused_constants(after: cst.Module, before: cst.Module) -> cst.Module:
    """Drop constants that only dropped markers have used."""

    def uses(module: cst.Module) -> Counter[str]:
        names = _Names()
        module.visit(names)
        return names.counts

    left, all_uses = uses(after), uses(before)
    constant = m.SimpleStatementLine([m.Assign([m.AssignTarget(m.Name())])])
    body = [
        node
        for node in after.body
        if not m.matches(node, constant)
        or left[name := tree.name_of(node)] > 1
        or all_uses[name] == 1
    ]
    return after.with_changes(body=body)

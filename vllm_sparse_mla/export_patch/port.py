# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A test file as upstream would have it: its imports, its markers."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_sparse_mla.export_patch.imports import (
    Binding,
    ImportEditor,
    bindings,
    drop_unused_imports,
)
from vllm_sparse_mla.export_patch.source import (
    Edit,
    apply_edits,
    blank_lines_above,
    drop_lines,
    end,
    first_line,
    is_import,
    used_names,
)

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
# Markers to which this repository's own conftest gives a meaning: what a tree that is
# patched does not need to know, and what upstream would write instead.
_DROPPED_MARKERS = ("interpreter", "stock_fails")
_GPU_MARKER = "pytest.mark.gpu"
# As long as what it replaces, so that lines break where they did.
_GPU_NAME = "requires_nvidia"
_GPU_CONDITION = [
    f"{_GPU_NAME} = pytest.mark.skipif(",
    '    not torch.cuda.is_available(), reason="needs an NVIDIA GPU"',
    ")",
]
_WIDTH = 88


@dataclass(frozen=True)
class PortedTest:
    """A test file as upstream would have it.

    Attributes:
        text: The file; None if all of it is about this package.
        left_out: Names of test functions that are about this package.
    """

    text: str | None
    left_out: tuple[str, ...] = ()


def port_test(text: str) -> PortedTest:
    """Rewrite a test file for upstream's repository.

    Shared modules are imported from their places among upstream's tests. Markers that
    only this repository knows are left out where they are decorators, alone in
    ``pytestmark``, or marks of a ``pytest.param`` on lines of its own; elsewhere they
    stay, and mark nothing. What exists for the plugin is left out too: a file that
    imports another module of this package, a function that names it.

    Args:
        text: The test file.
    """
    own = [b for b in bindings(text) if b.target.split(".")[0] == _OWN_PACKAGE]
    if None in map(_in_upstream, own):
        return PortedTest(None)
    before = text
    text = _with_gpu_condition(_without_dropped_markers(text))
    editor = ImportEditor(text, _WIDTH)
    for binding in own:
        editor.add(_in_upstream(binding))
        editor.remove(binding)
    text, left_out = _without_own_functions(editor.text)
    text = _without_unused_constants(text, used_names(before))
    return PortedTest(drop_unused_imports(text, editor.text, _WIDTH), left_out)


def upstream_module(name: str) -> str:
    """The name among upstream's tests of one of ``SHARED_MODULES``."""
    return f"{UPSTREAM_PACKAGE}.sparse_mla_{name}"


def _in_upstream(binding: Binding) -> Binding | None:
    """The import of a shared module, or from one; None for anything else."""
    for name in SHARED_MODULES:
        module = upstream_module(name)
        if binding.module == f"{_TESTING}.{name}":
            return replace(binding, module=module)
        if binding.target == f"{_TESTING}.{name}":
            package, _, module = module.rpartition(".")
            return Binding(package, module, binding.bound, binding.guarded)
    return None


def _without_own_functions(text: str) -> tuple[str, tuple[str, ...]]:
    lines = text.split("\n")
    names = []
    # From the bottom up, so that line numbers above stay true.
    for node in reversed(ast.parse(text).body):
        if not isinstance(node, ast.FunctionDef):
            continue
        start = first_line(lines, node)
        if any(_OWN_PACKAGE in line for line in lines[start : node.end_lineno]):
            lines = drop_lines(lines, start, node.end_lineno)
            names.append(node.name)
    return "\n".join(lines), tuple(reversed(names))


def _is_dropped(marker: ast.expr) -> bool:
    if isinstance(marker, ast.Call):
        marker = marker.func
    return ast.unparse(marker) in [f"pytest.mark.{m}" for m in _DROPPED_MARKERS]


def _is_dropped_pytestmark(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or ast.unparse(node.targets) != "pytestmark":
        return False
    return all(map(_is_dropped, getattr(node.value, "elts", [node.value])))


def _without_dropped_markers(text: str) -> str:
    lines = text.split("\n")
    dropped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for decorator in getattr(node, "decorator_list", []):
            if _is_dropped(decorator):
                dropped.update(range(decorator.lineno - 1, decorator.end_lineno))
        if _is_dropped_pytestmark(node):
            first = node.lineno - 1
            first -= blank_lines_above(lines, first)
            dropped.update(range(first, node.end_lineno))
    text = "\n".join(line for i, line in enumerate(lines) if i not in dropped)
    return apply_edits(text, _marks_of_params(text))


def _marks_of_params(text: str) -> Iterator[Edit]:
    """Edits that take dropped markers away from ``pytest.param(..., marks=...)``.

    Only where the call has its lines for itself: elsewhere lines would have to be
    broken anew.
    """
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.param":
            continue
        first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
        own_lines = first.lstrip().startswith("pytest.param(") and last.endswith("),")
        exploded = node.lineno != node.end_lineno
        if not own_lines or (exploded and last.strip() != "),"):
            continue
        if exploded and not lines[node.end_lineno - 2].endswith(","):
            continue
        for i, keyword in enumerate(node.keywords):
            if keyword.arg == "marks" and _is_dropped(keyword.value):
                previous = (node.args + node.keywords[:i])[-1]
                yield Edit(end(previous), end(keyword), "")


def _without_unused_constants(text: str, used_before: set[str]) -> str:
    """Drop constants that only dropped markers have used."""
    unused = used_before - used_names(text)
    lines = text.split("\n")
    # From the bottom up, so that line numbers above stay true.
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) in unused:
            lines = drop_lines(lines, node.lineno - 1, node.end_lineno)
    return "\n".join(lines)


def _with_gpu_condition(text: str) -> str:
    edits = [
        Edit.of(node, _GPU_NAME)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == _GPU_MARKER
    ]
    if not edits:
        return text
    editor = ImportEditor(apply_edits(text, edits), _WIDTH)
    if "torch" not in [b.bound for b in bindings(text)]:
        editor.add(Binding(None, "torch"))
    lines = editor.text.split("\n")
    last = [node for node in ast.parse(editor.text).body if is_import(node)][-1]
    lines[last.end_lineno : last.end_lineno] = ["", *_GPU_CONDITION]
    return "\n".join(lines)

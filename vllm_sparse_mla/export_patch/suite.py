# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tests as upstream would have them: its imports, its markers."""

import ast
from dataclasses import replace

from vllm_sparse_mla.export_patch.imports import Binding, ImportEditor, bindings

REFERENCE_MODULE = "tests.v1.attention.sparse_mla_reference"
_OWN_REFERENCE = "vllm_sparse_mla.reference"
_OWN_PACKAGE = "vllm_sparse_mla"
# Markers that this repository's own pytest run gives a meaning to.
_OWN_MARKERS = ("stock_fails", "interpreter")
_WIDTH = 88


def exported_test(text: str, name: str) -> str:
    """Rewrite a test file for upstream's repository.

    The reference module is imported from its place among upstream's tests, and
    decorators with markers that only this repository knows are left out.

    Args:
        text: The test file.
        name: What to call it in an error.

    Raises:
        ValueError: If it imports any other module of this package.
    """
    text = _without_own_markers(text)
    editor = ImportEditor(text, _WIDTH)
    for binding in bindings(text):
        if binding.target.split(".")[0] != _OWN_PACKAGE:
            continue
        editor.remove(binding)
        editor.add(_in_upstream(binding, name))
    return editor.text


def _in_upstream(binding: Binding, name: str) -> Binding:
    if binding.module == _OWN_REFERENCE:
        return replace(binding, module=REFERENCE_MODULE)
    if binding.target == _OWN_REFERENCE:
        package, _, module = REFERENCE_MODULE.rpartition(".")
        return Binding(package, module, binding.bound, binding.guarded)
    raise ValueError(
        f"{name} must import nothing of {_OWN_PACKAGE} but its reference module, and "
        f"imports {binding.target}"
    )


def _without_own_markers(text: str) -> str:
    lines: list[str | None] = list(text.split("\n"))
    for node in ast.walk(ast.parse(text)):
        for decorator in getattr(node, "decorator_list", []):
            if _marker(decorator) in _OWN_MARKERS:
                for row in range(decorator.lineno - 1, decorator.end_lineno):
                    lines[row] = None
    return "\n".join(line for line in lines if line is not None)


def _marker(decorator: ast.expr) -> str | None:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    name = ast.unparse(decorator)
    prefix = "pytest.mark."
    return name.removeprefix(prefix) if name.startswith(prefix) else None

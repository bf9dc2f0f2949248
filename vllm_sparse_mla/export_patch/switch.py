# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The project's variables among vLLM's own environment variables.

The plugin adds the variables at run time; upstream declares its variables in one file.
"""

import ast
from collections.abc import Collection

PATH = "vllm/envs.py"
_SWITCHES = {
    "VLLM_SPARSE_MLA_SM90": (
        "If set, sparse MLA prefills on Hopper (SM90) may take masked MHA, which needs",
        "the packed-mask branch in FA4's SM90 kernel, and fused_q is the CuTe DSL one.",
    ),
    "VLLM_SPARSE_MLA_QUANTIZED_KV": (
        "If set, sparse MLA prefills on SM100 may take masked MHA over quantized KV",
        "caches too.",
    ),
}
_FILES = {
    "VLLM_SPARSE_MLA_COSTS": (
        "File of coefficients, measured on this GPU, by which the time of sparse MLA",
        "prefills is estimated.",
    ),
}
VARIABLES = _SWITCHES | _FILES


def _declaration(name: str) -> str:
    return f"    {name}: " + ("str | None = None" if name in _FILES else "bool = False")


def _entry(name: str) -> list[str]:
    comment = [f"    # {text}" for text in VARIABLES[name]]
    if name in _FILES:
        return [*comment, f'    "{name}": lambda: os.getenv("{name}"),']
    return [
        *comment,
        f'    "{name}": lambda: (',
        f'        os.getenv("{name}", "0").strip().lower() in ("true", "1")',
        "    ),",
    ]


def declare_switches(before: str, names: Collection[str]) -> str:
    """Add variables to ``vllm/envs.py``.

    Args:
        before: Upstream's text.
        names: Some of ``VARIABLES``.

    Raises:
        ValueError: If the text has no table of variables.
    """
    lines = before.split("\n")
    declared: ast.stmt | None = None
    last_entry: ast.expr | None = None
    for node in ast.parse(before).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            declared = [n for n in node.body if isinstance(n, ast.AnnAssign)][-1]
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            last_entry = node.value.values[-1]
    if declared is None or last_entry is None:
        raise ValueError(f"{PATH} must have a table of variables, and has none")
    chosen = [name for name in VARIABLES if name in names]
    entries = [line for name in chosen for line in _entry(name)]
    declarations = [_declaration(name) for name in chosen]
    lines[last_entry.end_lineno : last_entry.end_lineno] = entries
    lines[declared.end_lineno : declared.end_lineno] = declarations
    return "\n".join(lines)

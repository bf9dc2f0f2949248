# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The project's variables among vLLM's own environment variables.

The plugin adds the variables at run time; upstream declares its variables in one file.
"""

import ast

from vllm_sparse_mla.export_patch.diff import Change
from vllm_sparse_mla.export_patch.splice import Definition

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
_VARIABLES = _SWITCHES | _FILES
_DECLARATIONS = [
    *(f"    {name}: bool = False" for name in _SWITCHES),
    *(f"    {name}: str | None = None" for name in _FILES),
]


def _entry(name: str) -> list[str]:
    comment = [f"    # {text}" for text in _VARIABLES[name]]
    if name in _FILES:
        return [*comment, f'    "{name}": lambda: os.getenv("{name}"),']
    return [
        *comment,
        f'    "{name}": lambda: (',
        f'        os.getenv("{name}", "0").strip().lower() in ("true", "1")',
        "    ),",
    ]


_ENTRIES = [line for name in _VARIABLES for line in _entry(name)]


def declare_switches(before: str) -> Change:
    """Add the variables to ``vllm/envs.py``.

    Args:
        before: Upstream's text.

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
    lines[last_entry.end_lineno : last_entry.end_lineno] = _ENTRIES
    lines[declared.end_lineno : declared.end_lineno] = _DECLARATIONS
    definitions = tuple(Definition(name, "new") for name in _VARIABLES)
    return Change(PATH, before, "\n".join(lines), definitions)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Shows records: a rich table on a terminal, aligned plain text in a pipe."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_sparse_mla.codegen.records import CodegenRecord

_HEADINGS = (
    "variant",
    "target",
    "SASS",
    "+mask",
    "applied",
    "loop",
    "+loop",
    "mask loads",
    "PTX loads",
    "regs",
    "local B",
    "LDL+STL",
    "s",
)


def show_records(records: Sequence[CodegenRecord], console: Console) -> None:
    """Print one row per record and the versions that they were made with."""
    rows = [_row(record) for record in records]
    versions = dict(
        sorted({k: v for r in records for k, v in r.versions.items()}.items())
    )
    footer = ", ".join(f"{name} {value}" for name, value in versions.items())
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows)]
        for row in (_HEADINGS, *rows):
            cells = [cell.ljust(width) for cell, width in zip(row, widths)]
            print("  ".join(cells).rstrip(), file=console.file)
        print(footer, file=console.file)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for heading in _HEADINGS:
        is_text = heading in ("variant", "target", "mask loads", "PTX loads")
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(footer, style="dim")


def _row(record: CodegenRecord) -> tuple[str, ...]:
    added = record.added_instructions
    added_loop = sum(record.added_loop_opcodes.values())
    return (
        record.variant.label,
        record.target,
        str(record.instructions),
        f"{added:+d}" if record.variant.callback != "none" else "-",
        str(record.applications or "-"),
        str(record.loop_instructions or "-"),
        f"{added_loop:+d}" if added_loop else "-",
        widths_text(record.mask_loads),
        widths_text(record.ptx_loads),
        str(record.registers),
        str(record.local_bytes),
        str(record.local_opcodes),
        f"{record.seconds:.1f}",
    )


def widths_text(loads: Mapping[int, int] | None) -> str:
    """Loads by width as ``2x128 1x32`` (count times bits), widest first."""
    items = sorted((loads or {}).items(), reverse=True)
    return " ".join(f"{count}x{bits}" for bits, count in items) or "-"

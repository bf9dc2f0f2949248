# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What tables show of records."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from vllm_sparse_mla.codegen.records import CodegenRecord
from vllm_sparse_mla.tables import make_table


def show_records(records: Sequence[CodegenRecord], console: Console) -> None:
    """Print one row per record and the versions that they were made with."""
    names = columns(records[0])
    table = make_table(console, None, "Variant", "Target", *names, "s")
    for record in records:
        cells = (record.variant.label, record.target, *columns(record).values())
        table.add_row(*cells, f"{record.seconds:.1f}")
    console.print(table)
    versions = {k: v for r in records for k, v in r.versions.items()}
    console.print(", ".join(f"{k} {v}" for k, v in sorted(versions.items())))


def columns(record: CodegenRecord) -> dict[str, str]:
    """What there is to say of a kernel, by short name."""
    added_loop = sum(record.added_loop_opcodes.values())
    return {
        "SASS": str(record.instructions),
        "+mask": f"{record.added_instructions:+d}",
        "applied": str(record.applications),
        "loop": str(record.loop_instructions),
        "+loop": f"{added_loop:+d}" if record.added_loop_opcodes else "-",
        "mask loads": widths_text(record.mask_loads),
        "PTX loads": widths_text(record.ptx_loads),
        "regs": str(record.registers),
        "local B": str(record.local_bytes),
        "LDL+STL": str(record.local_opcodes),
    }


def widths_text(loads: Mapping[int, int] | None) -> str:
    """Loads by width as ``2x128 1x32`` (count times bits), widest first."""
    items = sorted((loads or {}).items(), reverse=True)
    return " ".join(f"{count}x{bits}" for bits, count in items) or "-"

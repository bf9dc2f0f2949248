# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of benchmarks as tables; works on rows just measured and on rows of a CSV."""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ABSENT = "-"


def read_rows(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of CSV files, one file after another; every value is text."""
    rows = []
    for path in paths:
        with Path(path).open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def pivot(
    rows: Sequence[dict], index: Sequence[str], column: str, cell: Callable[[dict], str]
) -> list[dict[str, str]]:
    """One row for each combination of `index`, one column for each value of `column`.

    Args:
        rows: what was measured, one row for each cell.
        index: names that identify a row of the table.
        column: name whose values head the further columns.
        cell: text to show for a row.
    """
    heads = dict.fromkeys((row[column] for row in rows), ABSENT)
    table: dict[tuple, dict[str, str]] = {}
    for row in rows:
        key = tuple(str(row[name]) for name in index)
        line = table.setdefault(key, dict(zip(index, key)) | heads)
        line[row[column]] = cell(row)
    return list(table.values())


def markdown(rows: Sequence[dict]) -> str:
    """Rows as a Markdown table, the first column flush left."""
    names = list(rows[0])
    marks = ["---"] + ["---:"] * (len(names) - 1)
    lines = [names, marks, *([str(v) for v in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

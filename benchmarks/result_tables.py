# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of benchmarks as tables; works on rows just measured and on rows of a CSV."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

PACKAGES = ("vllm", "torch", "triton", "nvidia-cutlass-dsl")  # in each row of a CSV
ABSENT = "-"


def as_text(rows: Sequence[dict]) -> pd.DataFrame:
    """The rows as they are shown and saved: floats to 3 digits."""
    frame = pd.DataFrame(rows)
    return frame.map(lambda v: f"{v:.3f}" if isinstance(v, float) else str(v))


def read_rows(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of CSV files, one file after another; every value is text."""
    frames = [pd.read_csv(path, dtype=str, keep_default_na=False) for path in paths]
    return [row for frame in frames for row in frame.to_dict("records")]


def pivot(
    rows: Sequence[dict], index: Sequence[str], column: str, cell: Callable[[dict], str]
) -> list[dict[str, str]]:
    """One row for each combination of `index`, one column for each value of `column`.

    Both are in the order of the rows. A cell shows what `cell` makes of its row.
    """
    frame = pd.DataFrame([row | {"cell": cell(row)} for row in rows])
    table = frame.pivot(index=list(index), columns=column, values="cell")
    table = table.reindex(
        index=frame.set_index(list(index)).index.unique(),
        columns=frame[column].unique(),
    )
    return table.fillna(ABSENT).reset_index().to_dict("records")


def markdown(rows: Sequence[dict]) -> str:
    """Rows as a Markdown table, the first column flush left."""
    frame = as_text(rows)
    sides = ("left", *("right" for _ in frame.columns[1:]))
    return frame.to_markdown(index=False, colalign=sides, disable_numparse=True)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows that compare what servers answered to several rounds with stock's answers."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol


class Measured(Protocol):
    """What one server answered to one round, or to several as one."""

    def measures(self) -> dict[str, float]:
        """Numbers by name."""


def compared_rows(
    found: Mapping[tuple[object, str], Sequence[Measured]],
    place: str,
    merged: Callable[[Sequence[Measured]], Measured],
    counts: Collection[str],
) -> list[dict]:
    """A row for each place, measure and variant; stock is among these.

    Args:
        found: rounds by place and variant.
        place: name of what tells the places apart.
        merged: makes several rounds one.
        counts: measures that are not compared with stock's.
    """
    rows = []
    for (where, variant), rounds in found.items():
        # All rounds together, and then one by one.
        mine, stock = (
            [r.measures() for r in (merged(group), *group)]
            for group in (rounds, found[where, "stock"])
        )
        for name, value in mine[0].items():
            row = {place: where, "measure": name, "variant": variant}
            row |= {"value": value, "/ stock": "", "least": "", "greatest": ""}
            if name not in counts:
                ratio, *by_round = (
                    m[name] / s[name] if s[name] else math.nan
                    for m, s in zip(mine, stock)
                )
                row |= {"/ stock": ratio}
                row |= {"least": min(by_round), "greatest": max(by_round)}
            rows.append(row)
    return rows

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows that compare what servers answered to several rounds with stock's answers."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from serving.probe import read_gpu_memory, read_records
from serving.server import Server


class Measured(Protocol):
    """What one server answered to one round, or to several as one."""

    def measures(self) -> dict[str, float]:
        """Numbers by name."""


class Counters:
    """What a server did since this was made.

    Args:
        server: whose log tells what was compiled.
        folder: of its probe's records.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._masked = len(read_records(folder))
        self._compiled = len(server.jit_kernels())

    def note(self, answers) -> None:
        """Set ``masked``, ``compiled`` and ``tensors_mib`` of a round."""
        answers.masked = len(read_records(self._folder)) - self._masked
        answers.compiled = len(self._server.jit_kernels()) - self._compiled
        seen = read_gpu_memory(self._folder)
        answers.tensors_mib = seen[-1]["allocated"] / 2**20 if seen else 0.0


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

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Servers that answer the same in several rounds, compared with stock's answers."""

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
from bench_common import save_results, with_progress

from serving.probe import gpu_mib_at, read_records
from serving.server import Server
from serving.servers import setting_of


@dataclass(kw_only=True)
class Round:
    """What one server answered to one round, or to several as one."""

    seconds: float = 0.0  # from the first request to the last answer
    masked: int = 0  # calls of FA4 with a mask, over all layers
    compiled: int = 0  # kernels, meanwhile
    tensors_mib: float = 0.0  # GPU memory that tensors occupy, when all is answered

    def measures(self) -> dict[str, float]:
        """Numbers for people, by name."""
        raise NotImplementedError

    def errors(self) -> list[str]:
        """What the requests that failed came to."""
        raise NotImplementedError


AnyRound = TypeVar("AnyRound", bound=Round)
Found = dict[tuple[float, str], list[AnyRound]]  # rounds by place and variant


def merged(rounds: Sequence[AnyRound]) -> AnyRound:
    """All rounds as one."""
    whole = type(rounds[0])(tensors_mib=max(r.tensors_mib for r in rounds))
    for found in rounds:
        for name in vars(whole).keys() - {"tensors_mib"}:
            setattr(whole, name, getattr(whole, name) + getattr(found, name))
    return whole


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """The 50th and the 99th, in milliseconds."""
    return {
        f"{name} p{percent} ms": 1e3 * float(np.percentile(seconds, percent))
        if seconds
        else math.nan
        for percent in (50, 99)
    }


def add_round_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """How many rounds there are, and where their rows go."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, metavar="SECONDS",
        help="after which no round is begun, the first ones excepted",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path)


async def run_rounds(
    servers: Mapping[str, Server],
    schedule: Iterable[tuple[int, float]],
    run: Callable[[str, int, float, int], Awaitable[AnyRound]],
    time_limit: float,
) -> Found:
    """Load one server after the other in each round.

    An interrupt ends the run as the time limit does, and what is left of its round is
    dropped.

    Args:
        servers: by variant.
        schedule: number and place of each round; number 0 warms up.
        run: given variant, number and place of a round, and a seed of its own.
        time_limit: seconds after which no round is begun, number 1 of each place
            excepted.
    """
    found: Found = {}
    deadline = time.monotonic() + time_limit
    for seed, (number, place) in enumerate(with_progress(schedule, "rounds"), 1):
        if number > 1 and time.monotonic() > deadline:
            print(f"the time limit ended the run in round {number}", file=sys.stderr)
            break
        # Every other round backwards: no variant always follows the same one.
        order = list(servers)[:: 1 if number % 2 else -1]
        try:
            answers = {
                variant: await _run_round(
                    servers[variant], run(variant, number, place, seed)
                )
                for variant in order
            }
        except asyncio.CancelledError:
            if number <= 1:
                raise
            print(f"interrupted in round {number}", file=sys.stderr)
            break
        if number:
            for variant, answer in answers.items():
                found.setdefault((place, variant), []).append(answer)
    return found


async def _run_round(server: Server, run: Awaitable[AnyRound]) -> AnyRound:
    """A round, with what the server says of itself."""
    masked = len(read_records(server.folder))
    compiled = len(server.jit_kernels())
    answers = await run
    answers.masked = len(read_records(server.folder)) - masked
    answers.compiled = len(server.jit_kernels()) - compiled
    answers.tensors_mib = gpu_mib_at(server.folder, time.time())["allocated"]
    return answers


def compared_rows(found: Found, place: str, counts: Collection[str]) -> list[dict]:
    """A row for each place, measure and variant; stock is among these.

    Args:
        found: the rounds.
        place: name of what tells the places apart.
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


def finish(
    args: argparse.Namespace,
    found: Found,
    place: str,
    counts: Collection[str],
    show: Callable[[Sequence[dict]], str],
    bad: Collection[str],
) -> NoReturn:
    """Save and print the rows and some errors; ends with 1 if there is any ``bad``.

    ``place`` and ``counts`` are as of ``compared_rows``.
    """
    rows = [setting_of(args) | row for row in compared_rows(found, place, counts)]
    save_results(args, rows)
    print(show(rows))
    for (place, variant), rounds in found.items():
        for error in merged(rounds).errors()[:3]:
            print(f"{place:g}, {variant}: {error}")
    sys.exit(any(row["measure"] in bad and row["value"] for row in rows))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""House rules of the kernel benchmarks: arguments, timing, table, CSV, plot.

Variants are timed in turn within every repetition, over buffers that rotate through
more memory than the L2 cache holds. A spinning kernel goes first, so that all launches
of a sample are queued before the first one runs: the host's time between launches does
not count. Medians are given with the 10th and 90th percentile.
"""

import argparse
import functools
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from result_tables import PACKAGES, as_text, markdown
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

SPIN_ATTEMPTS = 5
SPIN_CYCLES_PER_US = 2000  # above any clock of a GPU, so a spin lasts long enough


@dataclass(frozen=True)
class Timing:
    """Device microseconds of one launch, and host microseconds to launch it."""

    samples: tuple[float, ...]
    host_us: float

    @property
    def median_us(self) -> float:
        """Median over the repetitions."""
        return statistics.median(self.samples)

    def columns(self) -> dict[str, float]:
        """The median and the 10th and 90th percentile, as rows have them."""
        low, high = np.percentile(self.samples, (10, 90))
        return {"median us": self.median_us, "p10 us": low, "p90 us": high}


def plain_parser(doc: str) -> argparse.ArgumentParser:
    """Parser of a program that is described by its module's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def argument_parser(
    doc: str,
    parse_shape: Callable[[str], object],
    shapes: Sequence[str],
    repeat: int = 20,
) -> argparse.ArgumentParser:
    """Parser with the options of a benchmark that takes samples of shapes.

    ``parse_shape`` turns a word of ``--shapes`` into a shape, or raises ValueError.
    """
    parser = plain_parser(doc)
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        default=[parse_shape(text) for text in shapes],
        help=f"default: {' '.join(shapes)}",
    )
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    parser.add_argument("--plot", type=Path, help="PNG file to draw (needs matplotlib)")
    parser.add_argument(
        "--repeat",
        type=int,
        default=repeat,
        help=f"samples of each variant (default: {repeat})",
    )
    return parser


def require_gpu() -> torch.device:
    """The device to measure on; ends the program where there is none."""
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU, and torch sees none.")
    return torch.device("cuda")


def on_sm90() -> bool:
    """Whether the GPU is a Hopper, where FA4 takes packed masks only by the opt-in."""
    return torch.cuda.get_device_capability()[0] == 9


def activate_overlay(hopper: bool = False) -> None:
    """Put the patch set in force, as vLLM's plugin loader does, or fail.

    ``hopper`` is with the opt-in for SM90, if this is one.
    """
    os.environ["VLLM_SPARSE_MLA_STRICT"] = "1"
    if hopper and on_sm90():
        os.environ["VLLM_SPARSE_MLA_SM90"] = "1"
    from vllm_sparse_mla.plugin import register

    register()


def with_progress(items: Iterable, what: str) -> Iterator:
    """The items, with a bar on standard error if that is a terminal.

    It is drawn between them and at no other time: a thread that draws would take part
    in what is being timed.
    """
    items = list(items)
    with Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task(what, total=len(items))
        bar.refresh()
        yield from bar.track(items, task_id=task)


def num_buffers(bytes_per_call: int) -> int:
    """Buffers to rotate through so that a call finds none of its own in L2."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return min(max(math.ceil(3 * l2_bytes / bytes_per_call) + 1, 3), 64)


def time_interleaved(
    variants: Mapping[str, Callable[[int], object]], buffers: int, repeat: int
) -> dict[str, Timing]:
    """Time variants in turn, `repeat` samples each.

    A variant is a function that launches on buffer number `i`; a sample launches once
    on each buffer.
    """
    host_us = {}
    for name, launch in variants.items():
        for _ in range(2):  # the first pass compiles and warms up
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(buffers):
                launch(i)
            host_us[name] = (time.perf_counter() - start) * 1e6 / buffers
        torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeat):
        for name, launch in variants.items():
            samples[name].append(_sample(launch, buffers, host_us[name]))
    return {
        name: Timing(tuple(values), host_us[name]) for name, values in samples.items()
    }


def _sample(launch: Callable[[int], object], buffers: int, host_us: float) -> float:
    spin_us = 2 * host_us * buffers + 100
    for _ in range(SPIN_ATTEMPTS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(spin_us * SPIN_CYCLES_PER_US))
        start.record()
        for i in range(buffers):
            launch(i)
        end.record()
        waited = not start.query()
        end.synchronize()
        if waited:
            return start.elapsed_time(end) * 1e3 / buffers
        spin_us *= 2
    raise RuntimeError(
        f"the GPU did not wait for the host in {SPIN_ATTEMPTS} attempts; run again on "
        "an idle host"
    )


class CheckFailed(Exception):
    """What was to be timed does not agree with what it is compared with."""


def measure_all(
    cases: Iterable,
    measure: Callable[[object], list[dict]],
    csv_file: Path | None,
    time_limit: float = math.inf,
) -> tuple[list[dict], int]:
    """Measure case after case; a case that fails its check is named and left out.

    The file grows with each case. After so many seconds no further case is begun.

    Returns:
        The rows, and how many cases failed their check.
    """
    deadline = time.monotonic() + time_limit
    rows, failed = [], 0
    for done, case in enumerate(with_progress(cases, "measuring")):
        if time.monotonic() > deadline:
            print(f"the time limit ended the run after {done} cases", file=sys.stderr)
            break
        try:
            rows += measure(case)
        except CheckFailed as error:
            print(f"{case} is not timed: {error}", file=sys.stderr)
            failed += 1
            continue
        if csv_file is not None:
            save_csv(csv_file, rows)
    return rows, failed


def copy_floor(bytes_per_call: int, buffers: int) -> Callable[[int], object]:
    """A device copy that reads and writes `bytes_per_call` bytes in all."""
    words = max(bytes_per_call // 8, 1)
    pairs = [
        (
            torch.randint(2**31 - 1, (words,), dtype=torch.int32, device="cuda"),
            torch.empty(words, dtype=torch.int32, device="cuda"),
        )
        for _ in range(buffers)
    ]

    def launch(i: int) -> object:
        source, target = pairs[i]
        return target.copy_(source)

    return launch


def timing_rows(
    timings: Mapping[str, Timing], num_bytes: int, buffers: int, case: dict
) -> list[dict]:
    """A row for each variant, among them ``stock`` and the ``floor``.

    ``num_bytes`` is what a launch has to move, ``case`` what the rows begin with.
    """
    rows = []
    for name, timing in timings.items():
        rows.append(
            case
            | {"variant": name}
            | timing.columns()
            | {
                "stock / this": timings["stock"].median_us / timing.median_us,
                "this / floor": timing.median_us / timings["floor"].median_us,
                "GB/s": num_bytes / timing.median_us / 1e3,
                "MB moved": num_bytes / 1e6,
                "host us": timing.host_us,
                "samples": len(timing.samples),
                "buffers": buffers,
            }
        )
    return rows


def report_timings(title: str, rows: Sequence[dict], args: argparse.Namespace) -> None:
    """Print rows of `timing_rows`, but for what a CSV alone holds, and save them."""
    hidden = ("MB moved", "samples", "buffers")
    shown = [{k: v for k, v in row.items() if k not in hidden} for row in rows]
    print_table(f"{title}, {torch.cuda.get_device_name()}", shown)
    save_results(args, rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        module = sys.modules.get(package.replace("-", "_"))
        return getattr(module, "__version__", "unknown")


@functools.cache
def _machine() -> dict[str, str]:
    gpu, driver = "none", ["none"]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
    return {
        "gpu": gpu,
        "driver": driver[0] if driver else "unknown",
        **{package: _version(package) for package in PACKAGES},
    }


def origin() -> dict[str, str]:
    """Where and how the rows came about: GPU, versions, date, command.

    The command names files without their folders, so that it reads the same anywhere.
    """
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    return _machine() | {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python3", script, *words]),
    }


def save_csv(path: Path, rows: Sequence[dict]) -> None:
    """Write the rows, each with what `origin` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    as_text([row | origin() for row in rows]).to_csv(path, index=False)


def save_results(args: argparse.Namespace, rows: Sequence[dict]) -> None:
    """What ``--csv`` and ``--plot`` ask for; a plot needs matplotlib and seaborn."""
    if args.csv is not None:
        save_csv(args.csv, rows)
    if args.plot is not None:
        from plots import draw

        draw(args.plot, [row | origin() for row in rows])


def print_table(title: str, rows: Sequence[dict]) -> None:
    """Print the rows as a Markdown table."""
    print(f"{title}\n\n{markdown(rows)}")

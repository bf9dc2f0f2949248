# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Servers, table and CSV of the serving benchmarks."""

import contextlib
import csv
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_sparse_mla.serving.probe import probe_environment
from vllm_sparse_mla.serving.server import VARIANTS, Server
from vllm_sparse_mla.serving.tiny_model import write_model

_PACKAGES = ("vllm", "vllm-sparse-mla", "torch", "triton", "nvidia-cutlass-dsl")


def variant_list(text: str) -> list[str]:
    """Argument type of ``--variants``."""
    variants = text.split(",")
    if unknown := set(variants) - set(VARIANTS):
        raise ValueError(f"variants must be of {VARIANTS}, got {sorted(unknown)}.")
    return variants


@contextlib.contextmanager
def running_servers(
    model: str,
    variants: Sequence[str],
    *,
    ranks: int = 1,
    all_lengths: bool = False,
    **kwargs,
) -> Iterator[tuple[dict[str, Server], dict[str, Path]]]:
    """Write the model, start one server per variant side by side, stop them.

    Args:
        model: A name of ``tiny_model.SPECS``.
        variants: Which of ``VARIANTS``.
        ranks: Tensor-parallel ranks that the dispatch is told of.
        all_lengths: Masked MHA, where available, takes prefills of every length.
        **kwargs: Further fields of ``Server``.

    Yields:
        The servers, and the folders of their probes' records, by variant.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", model)
        folders = {variant: folder / variant for variant in variants}
        servers = {
            variant: Server(
                folder / "model",
                variant,
                folders[variant] / "server.log",
                extra_env=probe_environment(
                    folders[variant], ranks=ranks, all_lengths=all_lengths
                ),
                **kwargs,
            ).start()
            for variant in variants
        }
        try:
            for server in servers.values():
                server.wait_ready()
            yield servers, folders
        finally:
            for server in servers.values():
                server.stop()


def _nvidia_smi(query: str) -> list[str]:
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.splitlines()


def gpu_memory_mib() -> int:
    """Memory in use on the first GPU, by all processes, in MiB."""
    return int(_nvidia_smi("memory.used")[0])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def save_csv(path: Path, rows: Sequence[dict]) -> None:
    """Write the rows, each with the GPU, versions, date and command."""
    origin = {
        "gpu": _nvidia_smi("name")[0],
        **{package: _version(package) for package in _PACKAGES},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python3", *sys.argv]),
    }
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *origin])
        writer.writeheader()
        writer.writerows(row | origin for row in rows)


def print_table(title: str, rows: Sequence[dict]) -> None:
    """Print the rows, numbers to three digits behind the point."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Servers of the serving benchmarks."""

import argparse
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench_common import with_progress

from serving.probe import GPU_MEMORY_PLUGIN, probe_environment
from serving.server import VARIANTS, Server
from vllm_sparse_mla.testing.tiny_model import SPECS, write_model

# For a server that stands for one rank of several: as there, no process both reads
# requests and launches kernels.
OWN_WORKER = ("--distributed-executor-backend", "mp")


def variant_list(text: str) -> list[str]:
    """Argument type of ``--variants``."""
    variants = text.split(",")
    if unknown := set(variants) - set(VARIANTS):
        raise ValueError(f"variants must be of {VARIANTS}, got {sorted(unknown)}.")
    return variants


def add_server_options(
    parser: argparse.ArgumentParser, model: str, ranks: int = 1
) -> None:
    """What the serving benchmarks let one choose of their servers."""
    parser.add_argument("--model", choices=sorted(SPECS), default=model)
    parser.add_argument("--variants", type=variant_list, default=list(VARIANTS))
    parser.add_argument(
        "--ranks", type=int, default=ranks, help="tensor-parallel ranks to stand for"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="as `vllm serve`'s")


def parse_comparison(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a program that compares servers with stock's."""
    args = parser.parse_args()
    if args.variants[0] != "stock":
        parser.error("--variants must begin with stock, which others are compared with")
    return args


def setting_of(args: argparse.Namespace) -> dict:
    """What the rows of servers begin with."""
    return {"model": args.model, "ranks": args.ranks, "kv cache": args.kv_cache_dtype}


@contextlib.contextmanager
def side_by_side(servers: Mapping[str, Server]) -> Iterator[None]:
    """Start servers together, wait until all are ready, and stop them in any case."""
    try:
        for server in servers.values():
            server.start()
        for server in with_progress(servers.values(), "starting servers"):
            server.wait_ready()
        yield
    finally:
        for server in servers.values():
            server.stop()


@contextlib.contextmanager
def running_servers(
    args: argparse.Namespace, variants: Sequence[str] | None = None, **kwargs
) -> Iterator[dict[str, Server]]:
    """Write the model, and run one server per variant.

    ``kwargs`` are fields of ``Server`` that the arguments do not set.

    Yields:
        The servers by variant.
    """
    # Stock loads the plugin that watches memory, as the others do, and nothing else.
    plugins = {"stock": {"VLLM_PLUGINS": GPU_MEMORY_PLUGIN}}
    variants = args.variants if variants is None else variants
    kwargs = {"kv_cache_dtype": args.kv_cache_dtype} | kwargs
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", args.model)
        servers = {
            variant: Server(
                folder / "model",
                variant,
                folder / variant,
                extra_env=probe_environment(folder / variant, ranks=args.ranks)
                | plugins.get(variant, {}),
                **kwargs,
            )
            for variant in variants
        }
        with side_by_side(servers):
            yield servers


def gpu_memory_mib() -> int:
    """Memory in use on the first GPU seen here, by all processes, in MiB."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    answer = subprocess.run(
        [
            *("nvidia-smi", "--id", gpu),
            *("--query-gpu=memory.used", "--format=csv,noheader,nounits"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(answer.stdout)

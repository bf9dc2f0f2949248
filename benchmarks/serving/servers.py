# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Servers of the serving benchmarks."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_common import with_progress

from serving.probe import GPU_MEMORY_PLUGIN, probe_environment
from serving.server import VARIANTS, Server
from vllm_sparse_mla.testing.tiny_model import write_model


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
    # Stock loads the plugin that watches memory, as the others do, and nothing else.
    plugins = {"stock": {"VLLM_PLUGINS": GPU_MEMORY_PLUGIN}}
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
                )
                | plugins.get(variant, {}),
                **kwargs,
            ).start()
            for variant in variants
        }
        try:
            for server in with_progress(servers.values(), "starting servers"):
                server.wait_ready()
            yield servers, folders
        finally:
            for server in servers.values():
                server.stop()


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

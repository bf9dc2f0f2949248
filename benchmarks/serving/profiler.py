# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a server's GPU ran for a request, by vLLM's torch profiler."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories in a torch trace


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a trace."""

    launches: int = 0  # how many there are
    # Milliseconds on the GPU, summed; kernels that run side by side both count.
    ms: float = 0.0

    def __add__(self, other: "Kernel") -> "Kernel":
        return Kernel(self.launches + other.launches, self.ms + other.ms)


def profiler_arguments(folder: Path) -> tuple[str, ...]:
    """Arguments of a server whose GPU work can be traced, into ``folder``."""
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder),
        "torch_profiler_activities": ["CUDA"],
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
    }
    return ("--profiler-config", json.dumps(config))


@contextlib.asynccontextmanager
async def profiling(
    session: aiohttp.ClientSession, url: str, name: str
) -> AsyncIterator[None]:
    """Trace what the server does meanwhile, under a name for ``read_trace``.

    Raises:
        aiohttp.ClientResponseError: The server has no profiler, or refuses the name.
    """

    async def post(path: str, body: dict) -> None:
        async with session.post(f"{url}/{path}", json=body) as response:
            response.raise_for_status()

    await post("start_profile", {"profile_prefix": name})
    try:
        yield
    finally:
        await post("stop_profile", {})


def read_trace(folder: Path, name: str) -> dict[str, Kernel]:
    """What the GPU ran in one trace, by the kernel's whole name.

    Raises:
        RuntimeError: There is no trace of that name, several, or one without any
            work of a GPU.
    """
    files = list(folder.glob(f"{name}_*.pt.trace.json"))
    if len(files) != 1:
        raise RuntimeError(
            f"{name} must have one trace, got {len(files)}; the server's log says why."
        )
    kernels: dict[str, Kernel] = {}
    for event in json.loads(files[0].read_text())["traceEvents"]:
        if event.get("cat") in GPU_WORK:
            launch = Kernel(1, event["dur"] / 1e3)
            kernels[event["name"]] = kernels.get(event["name"], Kernel()) + launch
    if not kernels:
        raise RuntimeError(f"the trace of {name} has no kernel; is CUPTI working?")
    return kernels

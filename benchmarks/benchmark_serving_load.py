# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Does `vllm serve` with the patch set hold up under load as stock vLLM does?

    python3 benchmarks/benchmark_serving_load.py --csv load.csv

Sixty-four clients per server send requests of mixed lengths, one after another,
for two minutes. Counted per server: requests, failures, and kernels that vLLM's JIT
monitor saw compiled after the warm-up. Before and after the two minutes, the server
being idle: host memory of its processes, GPU memory that its tensors occupy
(``allocated``) and that PyTorch's allocator took from the GPU (``reserved``; also
half-way: it keeps what the largest steps so far needed, and grows until it met them).
``GPU`` is what nvidia-smi says of all servers together.

The servers run at the same time, so their speeds are no comparison. Needs an SM90 GPU
and the package installed beside vLLM. Ends with 1 if a request failed.
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from bench_common import plain_parser, print_table, save_csv
from serving.client import Completion, make_prompt, open_session, stream
from serving.probe import gpu_mib_at
from serving.scenario import MAX_MODEL_LEN, MODEL
from serving.server import Server
from serving.servers import add_server_options, gpu_memory_mib, running_servers

PROMPT_TOKENS = (16, 7000)
GENERATED_TOKENS = (1, 64)
SHARED_PREFIXES = 4
SHARED_PREFIX_TOKENS = 500


@dataclass
class Load:
    """What one server did under load."""

    answers: list[Completion] = field(default_factory=list)
    prompt_tokens: int = 0


def _make_request(generator: random.Random) -> tuple[list[int], int]:
    """A prompt of log-uniform length, half of them behind a shared prefix."""
    low, high = PROMPT_TOKENS
    length = round(low * (high / low) ** generator.random())
    prompt = make_prompt(length, seed=generator.randrange(2**32))
    if generator.random() < 0.5:
        prefix = make_prompt(
            SHARED_PREFIX_TOKENS, seed=generator.randrange(SHARED_PREFIXES)
        )
        prompt = prefix + prompt
    return prompt, generator.randint(*GENERATED_TOKENS)


async def _client(session, url: str, seed: int, deadline: float, load: Load) -> None:
    generator = random.Random(seed)
    while time.monotonic() < deadline:
        prompt, max_tokens = _make_request(generator)
        load.answers.append(await stream(session, url, prompt, max_tokens))
        load.prompt_tokens += len(prompt)


async def _run(
    servers: Sequence[Server], clients: int, seconds: float, seed: int
) -> list[Load]:
    """What each server did."""
    loads = [Load() for _ in servers]
    deadline = time.monotonic() + seconds
    async with open_session() as session:
        await asyncio.gather(
            *(
                _client(session, server.url, seed + i, deadline, load)
                for server, load in zip(servers, loads, strict=True)
                for i in range(clients)
            )
        )
    return loads


def _host_mib(server: Server) -> float:
    processes = [psutil.Process(server.process.pid), *server.engine_processes()]
    return sum(process.memory_info().rss for process in processes) / 2**20


def _measure(servers: dict[str, Server], args: argparse.Namespace) -> list[dict]:
    group = list(servers.values())
    asyncio.run(_run(group, args.clients, args.warm_up, seed=1_000_000))
    compiled = [len(server.jit_kernels()) for server in group]
    host, gpu = [_host_mib(server) for server in group], gpu_memory_mib()
    idle = time.time()
    memory_before = [gpu_mib_at(server.folder, idle) for server in group]
    start = time.time()
    loads = asyncio.run(_run(group, args.clients, args.seconds, seed=0))
    end, gpu_after = time.time(), gpu_memory_mib()
    rows = []
    for i, (variant, server) in enumerate(servers.items()):
        answers = loads[i].answers
        failed = [answer.error for answer in answers if not answer.ok]
        new_kernels = server.jit_kernels()[compiled[i] :]
        before = memory_before[i]
        half_way = gpu_mib_at(server.folder, start + args.seconds / 2)
        after = gpu_mib_at(server.folder, end)
        for text in (*failed[:3], *new_kernels):
            print(f"{variant}: {text}")
        rows.append(
            {
                "variant": variant,
                "requests": len(answers),
                "failed": len(failed),
                "compiled": len(new_kernels),
                "prompt tokens/s": loads[i].prompt_tokens / args.seconds,
                "TTFT median ms": 1e3
                * statistics.median([a.ttft for a in answers if a.ok] or [math.nan]),
                "host MiB before": host[i],
                "host MiB after": _host_mib(server),
                "allocated MiB before": before["allocated"],
                "allocated MiB after": after["allocated"],
                "reserved MiB before": before["reserved"],
                "reserved MiB half-way": half_way["reserved"],
                "reserved MiB after": after["reserved"],
                "GPU MiB before": gpu,
                "GPU MiB after": gpu_after,
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = plain_parser(__doc__)
    add_server_options(parser, MODEL)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=120.0, help="seconds")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    with running_servers(args, max_model_len=MAX_MODEL_LEN) as servers:
        rows = _measure(servers, args)
    print_table(f"{args.clients} clients for {args.seconds:.0f} s", rows)
    if args.csv is not None:
        save_csv(args.csv, [{"model": args.model} | row for row in rows])
    sys.exit(any(row["failed"] for row in rows))


if __name__ == "__main__":
    main()

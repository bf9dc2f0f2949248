# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the GPU's time of a prefill goes in `vllm serve`: by kernel, stock and here.

    python3 benchmarks/benchmark_prefill_profile.py --csv profile.csv
    python3 benchmarks/benchmark_prefill_profile.py --model dsv32-16h --ranks 8

Servers and models are those of benchmark_serving_ttft.py, with a token budget that
takes every prompt in one step, and so is the check of their answers. Then, one request
at a time and the variants in turn: times to first token, the profiler being off; and
requests each under vLLM's torch profiler, which times what the GPU runs. A shape is the
length of a prompt in tokens.

Times on the GPU are sums over kernels, copies and fills, by the groups of
kernel_groups.py. Each is the median of its own over the requests, so groups add up to
all kernels only nearly.
"""

import asyncio
import itertools
import statistics
import tempfile
from pathlib import Path

from bench_common import argument_parser, save_results, with_progress
from kernel_groups import GROUPS, OTHER, group_of, short_name
from result_sections import ALL_KERNELS, FIRST_TOKEN, profile_groups, profile_totals
from serving.answers import compare_answers
from serving.client import burst, open_session
from serving.profiler import Kernel, profiler_arguments, profiling, read_trace
from serving.server import NO_COMPILE
from serving.servers import add_server_options, running_servers, setting_of

WARM_UP_ROUNDS = 2
NOTHING = Kernel()


def prompt_length(text: str) -> int:
    """Argument type of a shape."""
    length = int(text)
    if length < 1:
        raise ValueError(f"length must be positive, got {text!r}.")
    return length


async def measure(
    servers, traces: Path, lengths, repeat: int
) -> tuple[dict[tuple, list[float]], dict[tuple, list[dict[str, Kernel]]]]:
    """Times to first token in ms, and what the GPU ran, by length and variant."""
    cells = list(itertools.product(lengths, servers))
    ttft, kernels = ({cell: [] for cell in cells} for _ in range(2))
    async with open_session() as session:

        async def ask(length: int, variant: str, salt: str) -> float:
            (ms,) = await burst(session, servers[variant].url, length, 1, salt)
            return ms

        async def profile(length: int, variant: str, i: int) -> dict[str, Kernel]:
            name = f"{variant}-{length}-{i}"
            async with profiling(session, servers[variant].url, name):
                await ask(length, variant, name)
            return read_trace(traces, name)

        await compare_answers(session, servers, sorted(set(lengths)))
        for cell in with_progress(cells, "warming up"):
            for i in range(WARM_UP_ROUNDS):
                await ask(*cell, f"warm {i}")
        everything = list(itertools.product(range(repeat), cells))
        for i, cell in with_progress(everything, "timing"):
            ttft[cell].append(await ask(*cell, f"timed {i}"))
        for variant in servers:  # a process's first trace sets the profiler up
            await profile(lengths[0], variant, repeat)
        for i, cell in with_progress(everything, "profiling"):
            kernels[cell].append(await profile(*cell, i))
    return ttft, kernels


def rows_of_kernels(requests: list[dict[str, Kernel]]) -> list[dict]:
    """Rows of all kernels, of each group and of each kernel, over some requests."""
    totals: dict[tuple[str, str], list[Kernel]] = {
        key: [NOTHING] * len(requests)
        for key in [(ALL_KERNELS, ""), *((group, "") for group in (*GROUPS, OTHER))]
    }
    for i, request in enumerate(requests):
        for name, kernel in request.items():
            group = group_of(name)
            for key in ((ALL_KERNELS, ""), (group, ""), (group, short_name(name))):
                seen = totals.setdefault(key, [NOTHING] * len(requests))
                seen[i] = seen[i] + kernel
    rows = []
    for key, found in totals.items():
        launches = statistics.median_high(kernel.launches for kernel in found)
        rows.append(_row(*key, launches, [kernel.ms for kernel in found]))
    return rows


def _row(group: str, kernel: str, launches: int, times: list[float]) -> dict:
    return {
        "group": group,
        "kernel": kernel,
        "launches": launches,
        "median ms": statistics.median(times),
        "fastest ms": min(times),
        "slowest ms": max(times),
        "requests": len(times),
    }


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, prompt_length, ["4096", "8192", "16384"], 5)
    add_server_options(parser, "dsv32-128h")
    args = parser.parse_args()
    longest = max(args.shapes)
    with (
        tempfile.TemporaryDirectory() as traces,
        running_servers(
            args,
            max_model_len=longest + 256,
            max_num_batched_tokens=longest,
            extra_args=(*NO_COMPILE, *profiler_arguments(Path(traces))),
        ) as servers,
    ):
        ttft, kernels = asyncio.run(
            measure(servers, Path(traces), args.shapes, args.repeat)
        )
    rows = []
    for (length, variant), times in ttft.items():
        place = {"prompt tokens": length, "variant": variant}
        found = [
            _row(FIRST_TOKEN, "", 0, times),
            *rows_of_kernels(kernels[length, variant]),
        ]
        rows += [setting_of(args) | place | row for row in found]
    print(f"Milliseconds of a request\n\n{profile_totals(rows)}\n")
    print(f"By group of kernels\n\n{profile_groups(rows)}")
    save_results(args, rows)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time to first token of `vllm serve`: stock, patched, and patched with the opt-in.

    python3 benchmarks/benchmark_serving_ttft.py --csv ttft.csv
    python3 benchmarks/benchmark_serving_ttft.py --model dsv32-16h --ranks 8

The model has DeepSeek-V3.2's attention dimensions, random weights, a few layers
and a small dense feed-forward. One server per variant runs on one GPU; the
variants are measured in turn within every repetition while the others are idle.
Times are wall-clock milliseconds at the HTTP client, from sending a request to
its first token; of several requests at a time, all sent at once, each counts. A
shape is the length of the prompts in tokens, and how many are sent at a time.
Needs an SM90 GPU and the package installed beside vLLM.

With ``--model dsv32-16h --ranks 8`` one GPU does the work of one tensor-parallel
rank of 8, without the all-reduces; the dispatch is told of the other ranks.

With ``--kv-cache-dtype fp8`` masked MHA attends to a step's own tokens before they are
rounded. How much rounding changes is taken from stock: it answers from a bfloat16 cache
too, and the variants may differ by twice that. That server is not timed.
"""

import asyncio
import contextlib
import itertools
import statistics

from bench_common import (
    argument_parser,
    print_table,
    save_results,
    with_progress,
)
from serving.answers import compare_answers
from serving.client import burst, open_session
from serving.probe import read_records
from serving.servers import add_server_options, running_servers, setting_of

WARM_UP_ROUNDS = 2


def parse_shape(text: str) -> tuple[int, int]:
    """``2048x8``: prompts of 2048 tokens, 8 at a time."""
    length, count = map(int, text.split("x"))
    if length < 1 or count < 1:
        raise ValueError(f"shape must have positive sizes, got {text!r}.")
    return length, count


async def measure(servers, shapes, repeat: int, unquantized=None) -> list[dict]:
    """Rows of the table, one per shape and variant."""
    times = {(shape, variant): [] for shape in shapes for variant in servers}
    masked = dict.fromkeys(times, 0)
    async with open_session() as session:
        lengths = sorted({length for length, _ in shapes})
        answers = await compare_answers(session, servers, lengths, unquantized)
        everything = itertools.product(shapes, servers.items())
        for shape, (variant, server) in with_progress(everything, "warming up"):
            before = len(read_records(server.folder))
            for i in range(WARM_UP_ROUNDS):
                await burst(session, server.url, *shape, f"warm {shape} {i}")
            masked[shape, variant] = len(read_records(server.folder)) - before
        everything = itertools.product(range(repeat), shapes)
        for i, shape in with_progress(everything, "timing"):
            # Every other round backwards: no variant always follows the same one.
            for variant in list(servers)[:: -1 if i % 2 else 1]:
                times[shape, variant] += await burst(
                    session, servers[variant].url, *shape, f"timed {shape} {i}"
                )
    baseline = next(iter(servers))
    rows = []
    for (shape, variant), found in times.items():
        median = statistics.median(found)
        rows.append(
            {
                "prompt tokens": shape[0],
                "at a time": shape[1],
                "variant": variant,
                "TTFT median ms": median,
                "fastest ms": min(found),
                "slowest ms": max(found),
                f"{baseline} / this": statistics.median(times[shape, baseline])
                / median,
                "masked MHA calls": masked[shape, variant],
                "requests": len(found),
                **answers[shape[0]][variant],
            }
        )
    return rows


def main() -> None:
    """Command line."""
    shapes = [f"{n}x{count}" for count in (1, 8) for n in (2048, 4096, 8192, 16384)]
    parser = argument_parser(__doc__, parse_shape, shapes, repeat=5)
    add_server_options(parser, "dsv32-128h")
    args = parser.parse_args()
    longest = max(length for length, _ in args.shapes) + 256
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(running_servers(args, max_model_len=longest))
        unquantized = None
        if args.kv_cache_dtype != "auto":
            unrounded = running_servers(
                args, ["stock"], kv_cache_dtype="auto", max_model_len=longest
            )
            unquantized = stack.enter_context(unrounded)["stock"]
        rows = asyncio.run(measure(servers, args.shapes, args.repeat, unquantized))
    rows = [setting_of(args) | row for row in rows]
    print_table("Time to first token, milliseconds at the HTTP client", rows)
    save_results(args, rows)


if __name__ == "__main__":
    main()

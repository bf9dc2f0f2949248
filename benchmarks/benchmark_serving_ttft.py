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
import functools
import itertools
import statistics

from bench_common import (
    argument_parser,
    print_table,
    save_csv,
    save_plot,
    with_progress,
)
from serving.client import (
    complete,
    make_prompt,
    open_session,
    stream,
)
from serving.compare import between, difference, spread
from serving.probe import read_records
from serving.scenario import (
    STOCK_NOISE,
    control_difference,
    control_prompt,
)
from serving.server import VARIANTS
from serving.servers import running_servers, variant_list

from vllm_sparse_mla.testing.tiny_model import SPECS

WARM_UP_ROUNDS = 2
CHECK_RUNS = 2


async def _burst(session, url: str, length: int, count: int, salt: str) -> list[float]:
    """Milliseconds to the first token of ``count`` requests sent at once."""
    answers = await asyncio.gather(
        *(
            stream(session, url, make_prompt(length, seed=i), 1, salt=f"{salt} {i}")
            for i in range(count)
        )
    )
    errors = [answer.error for answer in answers if not answer.ok]
    if errors:
        raise RuntimeError(f"{len(errors)} of {count} requests failed: {errors[0]}")
    return [answer.ttft * 1e3 for answer in answers]


async def _check(
    session, servers, length: int, unquantized=None
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Compare the servers' answers to a prompt.

    Returns:
        Complaints about those that do not agree, and by variant columns for its rows.
    """

    def ask(server, prompt: list[int], salt: str):
        return complete(session, server.url, prompt, 1, salt=salt, score_prompt=True)

    def score(variant: str, prompt: list[int], salt: str):
        return ask(servers[variant], prompt, salt)

    prompt = make_prompt(length, seed=length)
    answers = {
        variant: [await score(variant, prompt, f"check {i}") for i in range(CHECK_RUNS)]
        for variant in servers
    }
    baseline = next(iter(servers))
    noise = spread(answers[baseline])
    # Another order of rounding also moves keys over the edge of the top-k, so a
    # single token may differ by more than runs of one variant do; the mean may not.
    allowed = max(2 * noise.mean, STOCK_NOISE)
    if unquantized is not None:
        unrounded = await ask(unquantized, prompt, "unquantized")
        rounding = difference(answers[baseline][0], unrounded).mean
        print(f"{length} tokens, rounding in the cache: {rounding:.5f} on average")
        allowed = max(allowed, 2 * rounding)
    complaints = []
    control = await score(baseline, control_prompt(prompt), "control")
    seen = control_difference(answers[baseline][0], control)
    print(
        f"{length} tokens, a quarter of the keys replaced: {seen.mean:.5f} on average"
    )
    if not seen.mean > 2 * allowed:
        complaints.append(
            f"{length} tokens: other keys change the answer by {seen.mean:.5f} on "
            f"average, too little to tell from the {allowed:.5f} allowed"
        )
    columns = {}
    for variant in servers:
        found = between(answers[baseline], answers[variant])
        columns[variant] = {
            "log-prob difference": f"{found.mean:.4f}",
            "log-prob difference with other keys": f"{seen.mean:.4f}",
        }
        print(
            f"{length} tokens, {variant} against {baseline}: log-probabilities "
            f"differ by {found.mean:.5f} on average, {found.largest:.4f} at most"
        )
        if not found.mean <= allowed:
            complaints.append(
                f"{length} tokens: {variant} answers otherwise than {baseline}, by "
                f"{found.mean:.5f} on average where {allowed:.5f} is allowed"
            )
    return complaints, columns


def parse_shape(text: str) -> tuple[int, int]:
    """``2048x8``: prompts of 2048 tokens, 8 at a time."""
    length, count = map(int, text.split("x"))
    if length < 1 or count < 1:
        raise ValueError(f"shape must have positive sizes, got {text!r}.")
    return length, count


async def measure(
    servers, folders, shapes, repeat: int, unquantized=None
) -> list[dict]:
    """Rows of the table, one per shape and variant."""
    times = {(shape, variant): [] for shape in shapes for variant in servers}
    masked = dict.fromkeys(times, 0)
    async with open_session() as session:
        complaints, answers = [], {}
        lengths = sorted({length for length, _ in shapes})
        for length in with_progress(lengths, "comparing answers"):
            found, answers[length] = await _check(session, servers, length, unquantized)
            complaints += found
        if complaints:
            raise RuntimeError("nothing was timed: " + "; ".join(complaints))
        everything = itertools.product(shapes, servers.items())
        for shape, (variant, server) in with_progress(everything, "warming up"):
            before = len(read_records(folders[variant]))
            for i in range(WARM_UP_ROUNDS):
                await _burst(session, server.url, *shape, f"warm {shape} {i}")
            masked[shape, variant] = len(read_records(folders[variant])) - before
        everything = itertools.product(range(repeat), shapes)
        for i, shape in with_progress(everything, "timing"):
            for variant, server in servers.items():
                times[shape, variant] += await _burst(
                    session, server.url, *shape, f"timed {shape} {i}"
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
    parser = argument_parser(__doc__, parse_shape, shapes)
    parser.set_defaults(repeat=5)
    parser.add_argument("--model", choices=sorted(SPECS), default="dsv32-128h")
    parser.add_argument("--variants", type=variant_list, default=list(VARIANTS))
    parser.add_argument(
        "--ranks", type=int, default=1, help="tensor-parallel ranks to stand for"
    )
    parser.add_argument(
        "--all-lengths",
        action="store_true",
        help="opt-in: masked MHA at every length, not only where the table has it",
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="as `vllm serve`'s")
    args = parser.parse_args()
    start = functools.partial(
        running_servers,
        args.model,
        ranks=args.ranks,
        all_lengths=args.all_lengths,
        max_model_len=max(length for length, _ in args.shapes) + 256,
    )
    with contextlib.ExitStack() as stack:
        servers, folders = stack.enter_context(
            start(args.variants, kv_cache_dtype=args.kv_cache_dtype)
        )
        unquantized = None
        if args.kv_cache_dtype != "auto":
            unquantized = stack.enter_context(start(["stock"]))[0]["stock"]
        rows = asyncio.run(
            measure(servers, folders, args.shapes, args.repeat, unquantized)
        )
    setting = {
        "model": args.model,
        "ranks": args.ranks,
        "kv cache": args.kv_cache_dtype,
    }
    rows = [setting | {"all lengths": args.all_lengths} | row for row in rows]
    print_table("Time to first token, milliseconds at the HTTP client", rows)
    if args.csv is not None:
        save_csv(args.csv, rows)
    if args.plot is not None:
        save_plot(args.plot, rows)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Up to which prompt length is masked MHA faster than sparse MQA, in a whole layer?

    python3 benchmarks/benchmark_masked_prefill.py --csv prefill.csv --plot prefill.png
    python3 benchmarks/benchmark_masked_prefill.py --from-csv prefill.csv

One request's prefill attention in one layer, by vLLM's own classes, from queries,
latents, paged cache and top-k rows to the output of all heads (BF16); prefill_step.py
says what each way does. A shape is ``QUERIES+CONTEXT`` in tokens; ``--ranks`` are
tensor-parallel sizes, of which one rank's heads are run. On SM100 stock's masked MHA
is timed in the same run; SM90 has none, and needs this project's opt-in, which is set
here. The outputs of all ways must agree within 3 % before anything is timed.

Last come the length at which both take the same time, and the prefill thresholds for
Hopper: where sparse MQA takes at least 1.05 times as long. ``--from-csv`` prints both
again from results, with no GPU.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bench_common import (
    CheckFailed,
    activate_overlay,
    argument_parser,
    measure_all,
    on_sm90,
    print_table,
    require_gpu,
    time_interleaved,
)
from mask_cases import MASKS
from prefill_step import MODELS, Prefill, Step, backend_classes
from result_tables import pivot, read_rows
from thresholds import (
    MASKED,
    RATIO,
    STOCK_MASKED,
    crossovers,
    derive_thresholds,
    to_json,
    to_source,
)

RANKS = (8, 1, 2, 4)
SHAPES = (
    *("2048+0", "4096+0", "8192+0", "16384+0", "32768+0"),
    *("1024+3072", "2048+2048"),
    *("512+7680", "1024+7168", "2048+6144", "4096+4096"),
    *("512+15872", "2048+14336", "4096+12288", "8192+8192"),
    *("1024+31744", "2048+30720", "4096+28672", "8192+24576"),
)
QUICK_SHAPES = ("4096+0", "8192+0", "1021+7171")
QUICK_RANKS = (8, 1)
MAX_RELATIVE_DIFFERENCE = 3e-2
LONG_STEP = 2**19  # queries times heads, from which on one call makes a sample
FORMULAS = (
    "TFLOP/s of masked MHA = 2 x heads x ((qk + v dims) x causal pairs of query and "
    "key + 512 x (nope + v dims) x keys) / time, of sparse MQA = 2 x heads x (1088 x "
    "selected pairs + 512 x (nope + v dims) x queries) / time; GB/s = (queries, "
    "output, latents, top-k rows once) / time"
)
INDEX = ("model", "ranks", "heads", "queries", "context")


def parse_shape(text: str) -> tuple[int, int]:
    """Argument type of ``--shapes``: queries and context."""
    queries, context = map(int, text.split("+"))
    if queries < 1 or context < 0:
        raise ValueError(f"a shape must have queries, got {text}")
    return queries, context


def usable_ways(
    prefill: Prefill, backends: dict[str, type]
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, float]]:
    """The ways that run here, and how far each is from masked MHA.

    Raises:
        CheckFailed: two ways differ by more than rounding.
    """
    makers = {MASKED: prefill.masked_mha}
    if not on_sm90():
        makers[STOCK_MASKED] = prefill.stock_masked_mha
    for name, backend in backends.items():
        makers[name] = lambda backend=backend: prefill.sparse_mqa(backend)
    ways, differences = {}, {}
    expected = None
    for name, make in makers.items():
        prefill.output.fill_(torch.nan)
        try:
            way = make()
            out = way().float()
            torch.cuda.synchronize()
        except (RuntimeError, AttributeError, ImportError) as error:
            if name == MASKED:
                raise
            print(f"{name} does not run here: {error}", file=sys.stderr)
            continue
        if expected is None:
            expected = out
        relative = float((out - expected).norm() / expected.norm())
        if not relative <= MAX_RELATIVE_DIFFERENCE:
            raise CheckFailed(f"{name} differs from {MASKED} by {relative:.2e}")
        ways[name], differences[name] = way, relative
    return ways, differences


def measure(step: Step, kind: str, repeat: int, backends: dict[str, type]) -> list:
    """Check, then time the ways of a step.

    Raises:
        CheckFailed: see `usable_ways`.
    """
    prefill = Prefill(step, kind, torch.device("cuda"))
    ways, differences = usable_ways(prefill, backends)
    calls = 1 if step.queries * step.heads >= LONG_STEP else 4
    launches = {name: lambda i, way=way: way() for name, way in ways.items()}
    timings = time_interleaved(launches, calls, repeat)
    rows = []
    for name, timing in timings.items():
        low, high = timing.spread_us
        is_mha = name in (MASKED, STOCK_MASKED)
        flops = step.mha_flops if is_mha else step.mqa_flops
        rows.append(
            {
                "model": step.model.name,
                "dims": f"{step.model.qk}/{step.model.v}",
                "ranks": step.ranks,
                "heads": step.heads,
                "queries": step.queries,
                "context": step.context,
                "top-k rows": kind,
                "way": name,
                "median us": timing.median_us,
                "p10 us": low,
                "p90 us": high,
                RATIO: timing.median_us / timings[MASKED].median_us,
                "TFLOP/s": flops / timing.median_us / 1e6,
                "GB/s": step.num_bytes / timing.median_us / 1e3,
                "host us": timing.host_us,
                "relative difference": f"{differences[name]:.1e}",
                "samples": len(timing.samples),
                "calls a sample": calls,
            }
        )
    return rows


def cell(row: dict) -> str:
    """Milliseconds, and how many times masked MHA's."""
    text = f"{float(row['median us']) / 1e3:.3f}"
    return text if row["way"] == MASKED else f"{text} ({float(row[RATIO]):.2f} x)"


def draw(path: Path, rows: Sequence[dict]) -> None:
    """Times of pure prefills above; better sparse MQA over masked MHA below.

    Where lines cross above, the better way changes. Below are prefills with context.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(row["model"], int(row["heads"])) for row in rows})
    figure, axes = pyplot.subplots(
        2, len(panels), figsize=(3.2 * len(panels), 7), squeeze=False
    )
    for column, (model, heads) in enumerate(panels):
        shown = [r for r in rows if r["model"] == model and int(r["heads"]) == heads]
        times, ratios = axes[0][column], axes[1][column]
        for way in dict.fromkeys(row["way"] for row in shown):
            pure = [r for r in shown if r["way"] == way and int(r["context"]) == 0]
            pure.sort(key=lambda row: int(row["queries"]))
            times.plot(
                [int(row["queries"]) for row in pure],
                [float(row["median us"]) / 1e3 for row in pure],
                marker="o",
                label=way,
            )
        better: dict[tuple[int, int], float] = {}
        for row in shown:
            queries, context = int(row["queries"]), int(row["context"])
            if context and row["way"] not in (MASKED, STOCK_MASKED):
                place = (queries + context, queries)
                better[place] = min(float(row[RATIO]), better.get(place, float("inf")))
        for keys in sorted({keys for keys, _ in better}):
            line = sorted((q, ratio) for (k, q), ratio in better.items() if k == keys)
            ratios.plot(*zip(*line), marker="o", label=f"{keys} tokens in all")
        times.set_title(f"{model}, {heads} heads")
        times.set_yscale("log")
        times.set_xlabel("prompt tokens, no context")
        ratios.axhline(1, color="black", linewidth=0.8)
        ratios.set_xlabel("new tokens, with context")
        for axis in (times, ratios):
            axis.set_xscale("log", base=2)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7)
    axes[0][0].set_ylabel("attention of one layer, ms")
    axes[1][0].set_ylabel("better sparse MQA / masked MHA")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def report(rows: Sequence[dict], args) -> None:
    """Everything that follows from the rows."""
    print_table(
        f"Prefill attention of one layer, ms (and times {MASKED}'s)\n{FORMULAS}",
        pivot(rows, INDEX, "way", cell),
    )
    print_table("Pure prefills take the same time at", crossovers(rows))
    table = derive_thresholds(rows)
    print("Thresholds derived from these rows:")
    print(to_source(table))
    if args.thresholds is not None:
        args.thresholds.parent.mkdir(parents=True, exist_ok=True)
        args.thresholds.write_text(json.dumps(to_json(table), indent=2) + "\n")
    if args.plot is not None:
        draw(args.plot, rows)


def run(args) -> tuple[list[dict], int]:
    """Rows of every step, and how many failed their check."""
    activate_overlay(hopper=True)
    from vllm.platforms.interface import DeviceCapability

    backends = backend_classes(DeviceCapability(*torch.cuda.get_device_capability()))
    everything = itertools.product(args.models, args.ranks, args.shapes)
    steps = [Step(MODELS[model], ranks, *shape) for model, ranks, shape in everything]
    return measure_all(
        steps,
        lambda step: measure(step, args.topk_rows, args.repeat, backends),
        args.csv,
        args.time_limit,
    )


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, parse_shape, SHAPES)
    parser.set_defaults(repeat=11)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--topk-rows", choices=MASKS[1:], default="uniform")
    parser.add_argument(
        "--quick", action="store_true", help="few shapes of DeepSeek, 1 and 8 ranks"
    )
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--thresholds", type=Path, help="JSON file to write them to")
    parser.add_argument("--from-csv", nargs="+", type=Path, help="report these rows")
    args = parser.parse_args()
    if args.from_csv:
        report(read_rows(args.from_csv), args)
        return
    if args.quick:
        args.shapes = [parse_shape(text) for text in QUICK_SHAPES]
        args.models, args.ranks = ["deepseek"], QUICK_RANKS
    require_gpu()
    rows, failed = run(args)
    if rows:
        report(rows, args)
    if failed:
        sys.exit(f"{failed} steps were not timed, because their outputs do not agree")


if __name__ == "__main__":
    main()

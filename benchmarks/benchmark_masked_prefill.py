# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""For which prefills is masked MHA faster than sparse MQA, in a whole layer?

    python3 benchmarks/benchmark_masked_prefill.py --csv prefill.csv --plot prefill.png
    python3 benchmarks/benchmark_masked_prefill.py --preset mixes --csv mixes.csv

The prefill attention of a step in one layer, by vLLM's own classes, from queries,
latents, paged cache and top-k rows to the output of all heads; prefill_step.py says
what each way does, prefill_batches.py how ``--shapes`` names the requests of a step.
``--heads`` are those of one tensor-parallel rank. On SM100 stock's masked MHA is timed
in the same run; SM90 has none, and needs this project's opt-in, which is set here. The
outputs of all ways must agree within 3 % before anything is timed. A step whose masks
do not fit vLLM's workspace has no masked MHA.

``--preset fit`` measures what the coefficients of the estimate are fitted to,
``--preset mixes`` batches that people serve. ``--context-splits`` times masked MHA
with so many parts of the cached keys as well, which the layer else decides; 0 takes
them together with the new ones, in one call. For the default shapes the length comes
last at which both ways take the same time.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence

import torch
from bench_common import (
    CheckFailed,
    activate_overlay,
    argument_parser,
    measure_all,
    on_sm90,
    print_table,
    require_gpu,
    save_results,
    time_interleaved,
)
from mask_cases import TOPK
from prefill_batches import fit_cases, mix_cases, parse_batch
from prefill_step import (
    MODELS,
    NAMES,
    TOPK_ROWS,
    Prefill,
    Step,
    backend_classes,
    make_step,
)
from result_tables import pivot
from thresholds import MASKED, RATIO, STOCK_MASKED, crossovers

SHAPES = (
    *("q2k", "q4k", "q8k", "q16k", "q32k"),
    *("q1ks4k", "q2ks4k"),
    *("q512s8k", "q1ks8k", "q2ks8k", "q4ks8k"),
    *("q512s16k", "q2ks16k", "q4ks16k", "q8ks16k"),
    *("q1ks32k", "q2ks32k", "q4ks32k", "q8ks32k"),
)
RANKS = (8, 1, 2, 4)  # tensor-parallel sizes whose heads are run by default
PRESETS = {"fit": fit_cases, "mixes": mix_cases}
KV_CACHE_DTYPES = ("auto", "fp8_ds_mla", "fp8")
MAX_RELATIVE_DIFFERENCE = 3e-2
LONG_STEP = 2**19  # queries times heads, from which on one call makes a sample
FORMULAS = (
    "TFLOP/s of masked MHA = 2 x heads x ((qk + v dims) x causal pairs of query and "
    "key + 512 x (nope + v dims) x keys) / time, of sparse MQA = 2 x heads x (1088 x "
    "selected pairs + 512 x (nope + v dims) x queries) / time; GB/s = (queries, "
    "output, latents, top-k rows once) / time"
)
INDEX = ("model", "heads", "top-k", "kv cache", "batch")


def usable_ways(
    prefill: Prefill, backends: dict[str, type], context_splits: Sequence[int]
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, float]]:
    """The ways that run here, and how far each is from the first.

    Raises:
        CheckFailed: two ways differ by more than rounding.
    """
    makers = {}
    if prefill.masks_fit():
        makers[MASKED] = prefill.masked_mha
        if not on_sm90() and prefill.step.dims.kv_cache_dtype == "auto":
            makers[STOCK_MASKED] = prefill.stock_masked_mha
        for parts in context_splits:
            how = f"{parts} parts" if parts else "one call"
            makers[f"{MASKED}, {how}"] = functools.partial(
                prefill.masked_mha_in_parts, parts
            )
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
            first, expected = name, out
        relative = float((out - expected).norm() / expected.norm())
        if not relative <= MAX_RELATIVE_DIFFERENCE:
            raise CheckFailed(f"{name} differs from {first} by {relative:.2e}")
        ways[name], differences[name] = way, relative
    return ways, differences


def measure(
    step: Step,
    repeat: int,
    backends: dict[str, type],
    context_splits: Sequence[int],
) -> list[dict]:
    """Check, then time the ways of a step.

    Raises:
        CheckFailed: see `usable_ways`.
    """
    prefill, dims = Prefill(step, torch.device("cuda")), step.dims
    ways, differences = usable_ways(prefill, backends, context_splits)
    calls = 1 if step.queries * dims.num_heads >= LONG_STEP else 4
    launches = {name: lambda i, way=way: way() for name, way in ways.items()}
    timings = time_interleaved(launches, calls, repeat)
    masked_us = timings[MASKED].median_us if MASKED in timings else math.nan
    properties = torch.cuda.get_device_properties(0)
    rows = []
    for name, timing in timings.items():
        is_mha = name.startswith((MASKED, STOCK_MASKED))
        flops = step.mha_flops if is_mha else step.mqa_flops
        rows.append(
            {
                "model": NAMES[step.model],
                "dims": f"{dims.qk_head_dim}/{dims.v_head_dim}",
                "ranks": MODELS[step.model].num_heads // dims.num_heads,
                "heads": dims.num_heads,
                "top-k": dims.index_topk,
                "kv cache": dims.kv_cache_dtype,
                "batch": str(step.batch),
                "queries": step.queries,
                "context": step.keys - step.queries,
                "chunks": prefill.num_chunks,
                "top-k rows": TOPK_ROWS,
                "way": name,
            }
            | timing.columns()
            | {
                RATIO: timing.median_us / masked_us,
                "TFLOP/s": flops / timing.median_us / 1e6,
                "GB/s": step.num_bytes / timing.median_us / 1e3,
                "host us": timing.host_us,
                "relative difference": f"{differences[name]:.1e}",
                "samples": len(timing.samples),
                "calls a sample": calls,
                "multiprocessors": properties.multi_processor_count,
                "max splits": prefill.max_splits,
            }
        )
    return rows


def cell(row: dict) -> str:
    """Milliseconds, and how many times masked MHA's."""
    text, ratio = f"{row['median us'] / 1e3:.3f}", row[RATIO]
    return (
        text if row["way"] == MASKED or math.isnan(ratio) else f"{text} ({ratio:.2f} x)"
    )


def report(rows: Sequence[dict], args) -> None:
    """Everything that follows from the rows."""
    print_table(
        f"Prefill attention of one layer, ms (and times {MASKED}'s)\n{FORMULAS}",
        pivot(rows, INDEX, "way", cell),
    )
    same = crossovers(rows)
    if same:
        print_table("Pure prefills take the same time at", same)
    save_results(args, rows)


def make_steps(args) -> list[Step]:
    """What the arguments ask for, only heads that a model has."""
    steps = []
    for name, model in MODELS.items():
        if name not in args.models:
            continue
        if args.preset:
            cases = [case[1:] for case in PRESETS[args.preset]() if case[0] == name]
        else:
            heads = args.heads or [model.num_heads // ranks for ranks in RANKS]
            cases = itertools.product(heads, [TOPK], args.shapes)
        steps += [
            make_step(name, heads, batch, topk, args.kv_cache_dtype)
            for heads, topk, batch in cases
            if heads <= model.num_heads and max(batch.seq_lens) >= topk
        ]
    return steps


def run(args) -> tuple[list[dict], int]:
    """Rows of every step, and how many failed their check."""
    activate_overlay(hopper=True)
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*torch.cuda.get_device_capability())
    backends = backend_classes(capability, args.kv_cache_dtype)
    return measure_all(
        make_steps(args),
        lambda step: measure(step, args.repeat, backends, args.context_splits),
        args.csv,
        args.time_limit,
    )


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, parse_batch, SHAPES, repeat=11)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--heads", nargs="+", type=int, help="of a rank (default: of TP 8, 1, 2 and 4)"
    )
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--preset", choices=PRESETS, help="in place of shapes")
    parser.add_argument("--context-splits", nargs="+", type=int, default=[])
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS")
    args = parser.parse_args()
    require_gpu()
    rows, failed = run(args)
    if rows:
        report(rows, args)
    if failed:
        sys.exit(f"{failed} steps were not timed, because their outputs do not agree")


if __name__ == "__main__":
    main()

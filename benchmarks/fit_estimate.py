# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fit the coefficients of the prefill estimate to measured steps, and judge it.

    python3 benchmarks/fit_estimate.py docs/results/prefill-fit-h200*.csv

The files are those of ``benchmark_masked_prefill.py --preset fit``. Coefficients are
at least 0 and make the squares of relative errors least. Every fourth batch is kept
from the fit, and only those are reported on: median and worst relative error of each
way, and the regret, which is the time lost against always taking the better way, of
the estimate, of the table that it took the place of, of masked MHA always and of sparse
MQA always.
"""

import json
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prefill_batches import Batch, parse_batch
from result_tables import read_rows
from thresholds import HOPPER_TABLE, MASKED, STOCK_MASKED, Table, table_admits

from vllm_sparse_mla.testing.stock import load_file

ROOT = Path(__file__).resolve().parents[1]
estimate = load_file(
    ROOT / "vllm/model_executor/layers/attention/sparse_mla_estimate.py"
)
in_force = load_file(ROOT / "vllm/model_executor/layers/attention/sparse_mla_h200.py")
DIGITS = 4  # of a coefficient


@dataclass
class Measured:
    """One step, and how long each way took."""

    dims: str  # head dimensions of Q and K, and of V, as the CSV has them
    ranks: int  # tensor-parallel size
    heads: int  # of the rank
    topk: int  # keys that a query selects
    kv_cache_dtype: str  # as vLLM spells it
    batch: Batch  # the requests
    num_chunks: int  # chunks in which the cached tokens were gathered
    num_sms: int  # multiprocessors of the GPU
    max_splits: int  # most parts in which cached keys were taken
    median_us: dict[str, float] = field(default_factory=dict)  # by way

    @property
    def is_kept(self) -> bool:
        """Whether it is kept from the fit, as it is with every head count and top-k."""
        return zlib.crc32(str(self.batch).encode()) % 4 == 0

    @property
    def backends(self) -> list[str]:
        """The backends whose sparse MQA was measured beside masked MHA."""
        if MASKED not in self.median_us:
            return []
        return [way for way in self.median_us if way not in (MASKED, STOCK_MASKED)]

    def terms(self, way: str) -> tuple[float, ...]:
        masked, sparse = estimate.prefill_terms(
            self.batch.query_lens,
            self.batch.context_lens,
            self.num_chunks,
            self.heads,
            self.topk,
            self.num_sms,
            self.max_splits,
        )
        return masked if way == MASKED else sparse


def read_measured(rows: Iterable[dict]) -> list[Measured]:
    """Steps from rows of ``benchmark_masked_prefill.py``."""
    found: dict[tuple, Measured] = {}
    for row in rows:
        row = {"max splits": "1"} | row  # which older files do not name
        step = Measured(
            row["dims"],
            int(row["ranks"]),
            int(row["heads"]),
            int(row["top-k"]),
            row["kv cache"],
            parse_batch(row["batch"]),
            int(row["chunks"]),
            int(row["multiprocessors"]),
            int(row["max splits"]),
        )
        step = found.setdefault(tuple(vars(step).values())[:-1], step)
        step.median_us[row["way"]] = float(row["median us"])
    return list(found.values())


def least_squares(terms: np.ndarray) -> np.ndarray:
    """Coefficients with which every row of terms comes nearest to 1; none negative.

    What would be negative is left out, the worst first. Terms are not negative.
    """
    sizes = terms.max(axis=0)
    used = np.flatnonzero(sizes)
    while True:
        scaled = terms[:, used] / sizes[used]
        solution = np.linalg.lstsq(scaled, np.ones(len(terms)))[0]
        if solution.min() >= 0:
            break
        used = np.delete(used, solution.argmin())
    coefficients = np.zeros(len(sizes))
    coefficients[used] = solution / sizes[used]
    return coefficients


def fit(gpu: str, steps: Sequence[Measured]) -> dict:
    """Coefficients as `make_estimate` takes them, of steps measured on one GPU."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for step in steps:
        for way in step.median_us:
            if way != STOCK_MASKED:
                kernel = estimate.sparse_mqa_kernel(
                    way, step.kv_cache_dtype, step.heads
                )
                key = (step.dims, kernel, step.kv_cache_dtype)
                groups.setdefault(key, []).append(step)
    microseconds: dict = {}
    for (dims, kernel, kv_cache_dtype), group in sorted(groups.items()):
        way = kernel.partition(",")[0]
        names = (
            estimate.MASKED_MHA_TERMS if way == MASKED else estimate.SPARSE_MQA_TERMS
        )
        times = np.array([step.median_us[way] for step in group])
        relative = np.array([step.terms(way) for step in group]) / times[:, None]
        by_dtype = microseconds.setdefault(dims, {}).setdefault(kernel, {})
        by_dtype[kv_cache_dtype] = {
            name: float(f"{value:.{DIGITS}g}")
            for name, value in zip(names, least_squares(relative))
        }
    ((num_sms, max_splits),) = {(step.num_sms, step.max_splits) for step in steps}
    return {
        "gpu": gpu,
        "multiprocessors": num_sms,
        "max_splits": max_splits,
        "one_pass": any(max(s.batch.context_lens) and not s.num_chunks for s in steps),
        "microseconds": microseconds,
    }


def estimated_us(costs: dict, step: Measured, backend: str) -> tuple[float, float]:
    """Masked MHA and sparse MQA of a step, as a server would estimate them."""
    qk_head_dim, v_head_dim = map(int, step.dims.split("/"))
    return estimate.make_estimate(
        costs,
        qk_head_dim,
        v_head_dim,
        backend,
        step.kv_cache_dtype,
        step.heads,
        step.topk,
    ).microseconds(step.batch.query_lens, step.batch.context_lens, step.num_chunks)


def errors(costs: dict, steps: Sequence[Measured]) -> list[dict]:
    """Median and worst relative error of each way."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for step in steps:
        for backend in step.backends:
            both = estimated_us(costs, step, backend)
            for way, us in zip((MASKED, backend), both):
                error = us / step.median_us[way] - 1
                key = (step.dims, way, step.kv_cache_dtype)
                found.setdefault(key, []).append(error)
    return [
        {
            "dims": dims,
            "way": way,
            "KV cache": kv_cache_dtype,
            "steps": len(values),
            "median error %": 100 * statistics.median(map(abs, values)),
            "worst error %": 100 * max(values, key=abs),
        }
        for (dims, way, kv_cache_dtype), values in sorted(found.items())
    ]


def rules(costs: dict, table: Table) -> dict[str, Callable[[Measured, str], bool]]:
    """Ways to decide whether a step takes masked MHA, beside a backend."""
    return {
        "estimate": lambda step, backend: (
            (both := estimated_us(costs, step, backend))[0] < both[1]
        ),
        "table": lambda step, backend: table_admits(
            table, step.dims, backend, step.ranks, step.batch
        ),
        "always masked MHA": lambda step, backend: True,
        "always sparse MQA": lambda step, backend: False,
    }


def regrets(costs: dict, table: Table, steps: Sequence[Measured]) -> list[dict]:
    """Time lost by each rule against always taking the better way."""
    rows = []
    for name, takes_masked in rules(costs, table).items():
        taken = best = 0.0
        worst, where = 0.0, ""
        for step in steps:
            for backend in step.backends:
                masked, sparse = step.median_us[MASKED], step.median_us[backend]
                time = masked if takes_masked(step, backend) else sparse
                better = min(masked, sparse)
                taken, best = taken + time, best + better
                if time / better > worst:
                    worst = time / better
                    where = f"{step.dims}, {step.heads} heads, top-k {step.topk}, "
                    where += f"{backend}: {step.batch}"
        rows.append(
            {
                "rule": name,
                "regret %": 100 * (taken / best - 1),
                "worst step / better way": worst,
                "worst step": where,
            }
        )
    return rows


def main() -> None:
    """Command line."""
    from bench_common import plain_parser, print_table

    parser = plain_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="CSV files to fit to")
    parser.add_argument("--json", type=Path, help="file for the coefficients")
    args = parser.parse_args()
    rows = read_rows(args.files)
    steps = read_measured(rows)
    costs = fit(rows[0]["gpu"], [step for step in steps if not step.is_kept])
    kept = [step for step in steps if step.is_kept]
    print_table(f"Errors on the {len(kept)} kept steps", errors(costs, kept))
    print_table("Regret on the kept steps", regrets(costs, HOPPER_TABLE, kept))
    if args.json is not None:
        args.json.write_text(json.dumps(costs, indent=4) + "\n")


if __name__ == "__main__":
    main()

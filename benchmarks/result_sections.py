# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What pages show of the rows of a benchmark: each function makes Markdown of them."""

from collections.abc import Callable, Sequence

import pandas as pd
from fit_estimate import (
    Measured,
    errors,
    estimated_us,
    in_force,
    read_measured,
    regrets,
    rules,
)
from result_tables import markdown, pivot
from thresholds import HOPPER_TABLE, MASKED, RATIO, STOCK_MASKED, crossovers

Rows = Sequence[dict]
FIRST_TOKEN, ALL_KERNELS = "time to first token", "all kernels"  # of a profile's groups
_PLACE = ("model", "prompt tokens", "group")
_SPREAD = ("median", "fastest", "slowest")


def _ms(row: dict) -> float:
    return float(row["median us"]) / 1e3


def _by_variant(
    rows: Rows,
    names: Sequence[str],
    cell: Callable[[dict], str],
    column: str = "variant",
) -> str:
    """A row for each case that `names` tell apart, a column for each variant."""
    return markdown(pivot(rows, names, column, cell))


def mask_times(rows: Rows) -> str:
    """Milliseconds of each callback, and the percentage over unmasked."""

    def cell(row: dict) -> str:
        over = 100 * (float(row["this / unmasked"]) - 1)
        percent = "" if row["variant"].startswith("unmasked") else f" ({over:+.1f} %)"
        return f"{_ms(row):.4f}{percent}"

    return _by_variant(rows, ("shape", "density"), cell)


def causal_times(rows: Rows) -> str:
    """The same of causal shapes alone, a run of stock vLLM in columns of its own."""
    return mask_times([row for row in rows if "causal" in row["shape"]])


def mask_details(rows: Rows) -> str:
    """Spread and rates of ours, and what its outputs were compared with."""
    names = ("shape", "p10 us", "p90 us", "TFLOP/s", "GB/s", "checked against")
    ours = [row for row in rows if row["variant"] == "ours"]
    return markdown([{name: row[name] for name in names} for row in ours])


def steps_both_ways(rows: Rows) -> list[dict]:
    """One row for each step that masked MHA and sparse MQA can both run."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        batch = row.get("batch") or f"q{row['queries']}+{row['context']}"
        key = (row["model"], row["heads"], row.get("top-k"), row.get("kv cache"), batch)
        found.setdefault(key, {})[row["way"]] = row
    steps = []
    for ways in found.values():
        sparse = [w for name, w in ways.items() if name not in (MASKED, STOCK_MASKED)]
        if MASKED in ways and sparse:
            best = min(sparse, key=_ms)
            names = ("model", "dims", "ranks", "heads", "queries", "context")
            row = {name: ways[MASKED][name] for name in names}
            row |= {"kv cache": ways[MASKED].get("kv cache", "auto")}
            row |= {"masked": _ms(ways[MASKED]), "sparse": _ms(best)}
            row |= {"ratio": float(best[RATIO])}
            if STOCK_MASKED in ways:
                row["stock"] = _ms(ways[STOCK_MASKED])
            steps.append(row)
    return steps


def prefill_summary(rows: Rows) -> str:
    """What the rows say, in three sentences."""
    steps = pd.DataFrame(steps_both_ways(rows))
    steps["context"] = steps["context"].astype(int)
    steps["heads"] = steps["heads"].astype(int)
    alone, behind = steps[steps["context"] == 0], steps[steps["context"] > 0]
    few, many = alone["heads"].min(), alone["heads"].max()
    wins = int((steps["ratio"] > 1).sum())
    parts = []
    for heads in (few, many):
        ratios = alone[alone["heads"] == heads]["ratio"]
        parts.append(f"{ratios.max():.1f} to {ratios.min():.1f} with {heads} heads")
    ends = []
    for place in (behind["ratio"].idxmax(), behind["ratio"].idxmin()):
        row = behind.loc[place]
        step = f"{row['queries']} tokens after {row['context']}, {row['heads']} heads"
        ends.append(f"{row['ratio']:.1f} ({step})")
    return (
        f"Masked MHA is faster than the better sparse MQA in {wins} of {len(steps)} "
        "measured steps. The time of sparse MQA over that of masked MHA is, for a "
        f"prompt alone, {' and '.join(parts)}, from the best length to the worst. "
        f"With a context it is from {ends[0]} down to {ends[1]}."
    )


def prefill_times(rows: Rows) -> str:
    """A table for each model: steps by heads, masked MHA over the better sparse MQA."""
    steps = steps_both_ways(rows)

    def cell(step: dict) -> str:
        text = f"{step['masked']:.3f} / {step['sparse']:.3f} ({step['ratio']:.2f})"
        return f"{text}; stock {step['stock']:.3f}" if "stock" in step else text

    tables = []
    for model, kv_cache in dict.fromkeys((s["model"], s["kv cache"]) for s in steps):
        shown = [s for s in steps if (s["model"], s["kv cache"]) == (model, kv_cache)]
        shown.sort(key=lambda step: int(step["heads"]))
        shown = [step | {"heads": f"{step['heads']} heads"} for step in shown]
        table = _by_variant(shown, ("queries", "context"), cell, "heads")
        cache = "" if kv_cache == "auto" else f", KV cache {kv_cache}"
        tables.append(f"{model}, {shown[0]['dims']}{cache}:\n\n{table}")
    return "\n\n".join(tables)


def prefill_crossovers(rows: Rows) -> str:
    """Where a prompt alone takes the same time both ways, by backend."""
    names = ("dims", "ranks")
    return _by_variant(crossovers(rows), names, lambda r: r["tokens"], "backend")


def prefill_mixes(rows: Rows) -> str:
    """Batches of any requests, each way's milliseconds."""
    names = ("model", "heads", "kv cache", "batch")
    return _by_variant(rows, names, lambda row: f"{_ms(row):.3f}", "way")


def kept_errors(rows: Rows) -> str:
    """How far the estimates in force are off the steps that were kept from the fit."""
    return markdown(errors(in_force.COSTS, _kept(rows)))


def kept_regrets(rows: Rows) -> str:
    """Time lost in those steps, by the rule that decides."""
    return markdown(regrets(in_force.COSTS, HOPPER_TABLE, _kept(rows)))


def _kept(rows: Rows) -> list[Measured]:
    return [step for step in read_measured(rows) if step.is_kept]


def all_regrets(rows: Rows) -> str:
    """The same of all steps."""
    return markdown(regrets(in_force.COSTS, HOPPER_TABLE, read_measured(rows)))


def choices(rows: Rows) -> str:
    """What the table and the estimate take, beside vLLM's default backend on SM90."""
    return markdown(_choices(rows))


def table_losses(rows: Rows) -> str:
    """Of these the batches for which the table took the slower way."""
    return markdown([row for row in _choices(rows) if "(" in row["table takes"]])


def _choices(rows: Rows) -> list[dict[str, str]]:
    backend = "FLASH_ATTN_MLA_SPARSE"
    table = []
    for step in read_measured(rows):
        sparse = step.median_us[backend]
        masked = step.median_us.get(MASKED)
        row = {"dims": step.dims, "heads": str(step.heads), "batch": str(step.batch)}
        row |= {"sparse MQA ms": f"{sparse / 1e3:.3f}", "masked MHA ms": "no room"}
        row |= {"estimated": "-", "table takes": "sparse", "estimate takes": "sparse"}
        if masked is not None:
            row["masked MHA ms"] = f"{masked / 1e3:.3f}"
            both = estimated_us(in_force.COSTS, step, backend)
            row["estimated"] = " / ".join(f"{us / 1e3:.3f}" for us in reversed(both))
            for name in ("table", "estimate"):
                takes_masked = rules(in_force.COSTS, HOPPER_TABLE)[name]
                way, us = ("sparse", sparse)
                if takes_masked(step, backend):
                    way, us = ("masked", masked)
                loss = us / min(masked, sparse)
                row[f"{name} takes"] = way if loss == 1 else f"{way} ({loss:.2f})"
        table.append(row)
    return table


def _microseconds(rows: Rows, *names: str) -> str:
    """Medians of each variant, a row for each case that the columns name."""
    return _by_variant(rows, names, lambda row: f"{float(row['median us']):.1f}")


def build_times(rows: Rows) -> str:
    """Microseconds of each builder."""
    return _microseconds(rows, "shape", "rows")


def layout_times(rows: Rows) -> str:
    """Microseconds of each way to lay out Q or K."""
    return _microseconds(rows, "part", "model", "shape")


def first_calls(rows: Rows) -> str:
    """A summary of each builder's first calls."""
    columns = ["first call ms", "later calls ms", "compilations"]
    frame = pd.DataFrame(rows).astype(dict.fromkeys(columns, float))
    groups = frame.groupby("variant", sort=False)
    summary = pd.DataFrame(
        {
            "lengths": groups.size(),
            "compilations": groups["compilations"].sum().astype(int),
            "first call ms, median": groups["first call ms"].median(),
            "fastest": groups["first call ms"].min(),
            "slowest": groups["first call ms"].max(),
            "later calls ms, median": groups["later calls ms"].median(),
        }
    )
    return markdown(summary.reset_index().to_dict("records"))


def ttft(rows: Rows) -> str:
    """Milliseconds to the first token: median, fastest and slowest of each variant."""

    def cell(row: dict) -> str:
        middle, low, high = (
            float(row[name]) for name in ("TTFT median ms", "fastest ms", "slowest ms")
        )
        return f"{middle:.1f} ({low:.1f} to {high:.1f})"

    rows = [{"kv cache": "auto"} | row for row in rows]
    names = ("model", "ranks", "kv cache", "prompt tokens", "at a time")
    return _by_variant(rows, names, cell)


def answers(rows: Rows) -> str:
    """How far each variant's answers are from the first one's, and what is noticed."""
    name, control = "log-prob difference", "log-prob difference with other keys"
    rows = [{"kv cache": "auto"} | row for row in rows if name in row]
    if not rows:
        return "*Not recorded in these rows.*"
    rows = [row for row in rows if row["at a time"] == rows[0]["at a time"]]
    names = ("model", "kv cache", "prompt tokens", control)
    return _by_variant(rows, names, lambda row: row[name])


def profile_totals(rows: Rows) -> str:
    """Milliseconds to the first token and of all kernels, and stock's over each."""
    shown = [row for row in rows if row["group"] in (FIRST_TOKEN, ALL_KERNELS)]
    baseline = rows[0]["variant"]
    stock, cells, ratios = {}, [], []
    for row in shown:
        place = tuple(row[name] for name in _PLACE)
        ms, low, high = (float(row[f"{name} ms"]) for name in _SPREAD)
        cells.append(row | {"text": f"{ms:.1f} ({low:.1f} to {high:.1f})"})
        if row["variant"] == baseline:
            stock[place] = ms
        else:
            name = f"{baseline} / {row['variant']}"
            ratios.append(row | {"variant": name, "text": f"{stock[place] / ms:.2f}"})
    return _by_variant(cells + ratios, _PLACE, lambda row: row["text"])


def profile_groups(rows: Rows) -> str:
    """Milliseconds of each group of kernels, and of all."""
    shown = [row for row in rows if not row["kernel"] and row["group"] != FIRST_TOKEN]
    return _by_variant(shown, _PLACE, lambda row: f"{float(row['median ms']):.2f}")


def profile_kernels(rows: Rows) -> str:
    """Kernels that take a hundredth of a variant's time, at the middle length."""
    lengths = sorted({int(row["prompt tokens"]) for row in rows})
    middle = lengths[len(lengths) // 2]
    rows = [row for row in rows if int(row["prompt tokens"]) == middle]
    whole = {
        (row["model"], row["variant"]): float(row["median ms"])
        for row in rows
        if row["group"] == ALL_KERNELS
    }
    large = {
        (row["model"], row["kernel"])
        for row in rows
        if row["kernel"]
        and float(row["median ms"]) >= 0.01 * whole[row["model"], row["variant"]]
    }
    shown = [
        row | {"kernel": f"`{row['kernel']}`"}
        for row in rows
        if (row["model"], row["kernel"]) in large
    ]

    def cell(row: dict) -> str:
        return f"{float(row['median ms']):.3f} ({row['launches']})"

    return _by_variant(shown, (*_PLACE, "kernel"), cell)


def load(rows: Rows) -> str:
    """What was counted under load, a column for each variant."""
    shown = list(rows[0])[2 : list(rows[0]).index("gpu")]
    table = [
        {"": name} | {row["variant"]: row[name] for row in rows} for name in shown
    ]  # fmt: skip
    return markdown(table)


MAY_BE_SLOWER = 0.03  # than stock, as a share of its time or rate


def multi_turn(rows: Rows) -> str:
    """Numbers of a multi-turn server by variant, and which are worse than stock's."""
    return _compared(rows, "turn tokens", "turns of {}")


def day(rows: Rows) -> str:
    """The same of servers under a day's mix of requests."""
    return _compared(rows, "rate", "{} requests/s sent")


def launches(rows: Rows) -> str:
    """What was seen of each launch, which complained of nothing."""

    def line(row: dict) -> dict:
        def largest(which: str) -> str:
            return f"{row[which]['largest']:.2f}"

        drafted = row["drafted, accepted"]
        return {
            "row": row["launch"],
            "stock's spread, twice": largest("budget"),
            "patched from stock": largest("patched"),
            "opt-in from stock": largest("opt-in"),
            "drafts accepted: stock, patched, opt-in": ", ".join(
                f"{accepted} of {all_of_them}"
                for all_of_them, accepted in drafted.values()
                if all_of_them
            ),
            "date": row["date"],
        }

    return markdown([line(row) for row in rows if not row["complaints"]])


def upstream_ways(rows: Rows) -> str:
    """Milliseconds by vLLM's own attention benchmark in its mode mha_vs_mqa."""

    def cell(row: dict) -> str:
        return f"{float(row['mean_time']) * 1e3:.4f}"

    return markdown(pivot(rows, ("batch_spec",), "backend", cell))


def _compared(rows: Rows, place: str, words: str) -> str:
    """Rows of ``compared_rows``; ``words`` say a place in a sentence."""

    def cell(row: dict) -> str:
        if row["/ stock"] == "":
            return f"{float(row['value']):.0f}"
        value = f"{float(row['value']):.1f}"
        if row["variant"] == "stock":
            return value
        names = ("/ stock", "least", "greatest")
        ratio, least, greatest = (f"{float(row[name]):.3f}" for name in names)
        return f"{value} ({ratio}; {least} to {greatest})"

    # What the last variant is slower in than stock.
    variant = rows[-1]["variant"]
    worse = []
    for row in rows:
        if row["variant"] == variant and row["/ stock"] != "":
            ratio = float(row["/ stock"])
            slower = 1 - ratio if row["measure"].endswith("/s") else ratio - 1
            # For want of answers a ratio may be no number, which is no better.
            if not slower <= MAY_BE_SLOWER:
                where = words.format(row[place])
                worse.append(f"{row['measure']}, {where} ({ratio:.3f})")
    found = f": {'; '.join(worse)}" if worse else " nowhere"
    table = _by_variant(rows, (place, "measure"), cell)
    return f"{table}\n\nWorse than stock by more than 3 %, `{variant}`{found}."


def tests(rows: Rows) -> str:
    """Outcomes of the tests by file."""
    names = ("file", "passed", "failed", "skipped", "seconds")
    return markdown([{name: row[name] for name in names} for row in rows])


def ran(rows: Rows) -> str:
    """The steps of a GPU report, whether they succeeded, and how long they took."""
    return markdown(
        [{name: row[name] for name in ("step", "outcome", "seconds")} for row in rows]
    )


def layer_errors(rows: Rows) -> str:
    """Errors against the float64 oracle, over each group of scenarios."""
    frame = pd.DataFrame([r for r in rows if r["kind"] in ("float64", "remainder")])
    per_range = frame["scenario"].str.contains("per range True")
    frame["cases"] = frame["kind"].map(
        {"float64": "scenarios", "remainder": "contexts at every remainder modulo 32"}
    ) + per_range.map({True: ", one mask a range", False: ""})
    table = frame.groupby(["model", "heads", "cases"], sort=False).agg(
        number=("rows", "size"),
        largest=("largest_error", "max"),
        over_budget=("error_over_budget", "max"),
    )
    table["largest"] = table["largest"].map("{:.2e}".format)
    names = {"model": "dims", "largest": "largest error",
             "over_budget": "worst error / budget"}  # fmt: skip
    return markdown(table.reset_index().rename(columns=names).to_dict("records"))


def layer_beside_mqa(rows: Rows) -> str:
    """Masked MHA and upstream's sparse MQA on the same rows."""
    frame = pd.DataFrame([row for row in rows if row["kind"] == "sparse MQA"])
    columns = {
        "masked_error": "masked MHA's error",
        "mqa_error": "sparse MQA's error",
        "largest_difference": "largest difference",
    }
    groups = frame.groupby(["model", "heads"], sort=False)
    table = groups[list(columns)].max().map("{:.2e}".format).rename(columns=columns)
    table["difference / budget"] = groups["difference_over_budget"].max()
    return markdown(table.reset_index(names=["dims", "heads"]).to_dict("records"))


def layer_launches(rows: Rows) -> str:
    """Launches of one layer by kind, ours / stock."""
    found = [row for row in rows if row["kind"] == "launches"]
    kinds = dict.fromkeys(k for row in found for k in (*row["ours"], *row["stock"]))
    return markdown(
        [
            {"case": row["case"]}
            | {k: f"{row['ours'].get(k, 0)} / {row['stock'].get(k, 0)}" for k in kinds}
            | {"all": f"{row['ours_total']} / {row['stock_total']}"}
            for row in found
        ]
    )


def layer_warm_up(rows: Rows) -> str:
    """Kernels compiled at start-up, and after it for prompts of any length."""
    return markdown(
        [
            {
                "dims": row["dims"],
                "queries": row["lengths"],
                "FA4 kernels": row["kernels"][0],
                "seconds": f"{row['fa4_seconds']:.1f}",
                "mask kernels' seconds": f"{row['builder_seconds']:.1f}",
                "compiled afterwards": sum(row["after"]) - sum(row["kernels"]),
            }
            for row in rows
            if row["kind"] == "warm-up"
        ]
    )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One plot for each benchmark, drawn from the rows of its CSV.

``draw`` finds the plot by the command that the rows carry. The same rows give the same
file, byte by byte, with the versions in requirements/benchmark.txt.
"""

import io
import shlex
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import seaborn as sns
from kernel_groups import GROUPS, OTHER
from matplotlib.figure import Figure
from prefill_batches import parse_batch
from thresholds import MASKED, RATIO, STOCK_MASKED

matplotlib.rcParams["svg.hashsalt"] = "vllm-sparse-mla"  # else names are random
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
sns.set_theme(style="whitegrid", font_scale=0.8)

MASK_NAMES = {"ones": "all keys", "uniform": "top-k anywhere", "recent": "top-k recent",
              "clustered": "top-k clustered"}  # fmt: skip


def _log_axes(grid: sns.FacetGrid) -> None:
    for axes in grid.axes.flat:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.tick_params(axis="x", rotation=90)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def _shape(text: str) -> str:
    """``1x256x2048/8/ones/offset/256`` in words; mask_cases.py explains the shape."""
    sizes, heads, mask, *rest = text.split("/")
    requests, queries, keys = sizes.split("x")
    words = [f"{queries} x {keys}", f"{heads} heads", MASK_NAMES[mask]]
    words += [{"256": "256/256"}.get(word, word) for word in rest]
    return ", ".join(([] if requests == "1" else [f"{requests} requests"]) + words)


def _mask(frame: pd.DataFrame) -> tuple[str, Figure]:
    frame = frame[frame["variant"] != "unmasked"].assign(
        shape=lambda f: f["shape"].map(_shape),
        over=lambda f: 100 * (f["this / unmasked"] - 1),
    )
    height = 0.28 * frame["shape"].nunique() + 1
    grid = sns.catplot(
        frame, kind="bar", x="over", y="shape", hue="variant", height=height,
        aspect=9 / height,
    )  # fmt: skip
    grid.set_axis_labels("time over the unmasked kernel, %", "queries x keys")
    return "What a mask costs inside FlashAttention-4", grid.figure


def _prefill(frame: pd.DataFrame) -> tuple[str, Figure]:
    if "batch" in frame:
        alone = frame["batch"].map(lambda text: len(parse_batch(text).requests) == 1)
        frame = frame[alone & (frame["top-k"] == frame["top-k"].max())]
    frame = frame[~frame["way"].isin((MASKED, STOCK_MASKED))]
    frame = frame.assign(total=frame["queries"] + frame["context"])
    models, heads = (sorted(frame[name].unique()) for name in ("model", "heads"))
    figure = Figure(figsize=(3.2 * len(heads) + 1, 3.2 * len(models)))
    panels = figure.subplots(len(models), len(heads), squeeze=False)
    for axes, (model, count) in zip(
        panels.flat, ((model, count) for model in models for count in heads)
    ):
        shown = frame[(frame["model"] == model) & (frame["heads"] == count)]
        axes.set_visible(len(shown) > 0)
        if len(shown) == 0:
            continue
        ratios = shown.pivot_table(
            index="total", columns="queries", values=RATIO, aggfunc="min"
        )
        sns.heatmap(
            np.log2(ratios), annot=ratios, fmt=".2g", cmap="RdBu", center=0, vmin=-3,
            vmax=3, cbar=False, ax=axes,
        )  # fmt: skip
        axes.set(title=f"{model}, {count} heads", xlabel="new tokens",
                 ylabel="tokens with context")  # fmt: skip
        axes.tick_params(axis="y", rotation=0)
        axes.grid(False)
    figure.tight_layout()
    return (
        "Time of the better sparse MQA over that of masked MHA (blue: masked MHA is "
        "faster), one layer",
        figure,
    )


def _build(frame: pd.DataFrame) -> tuple[str, Figure]:
    sizes = frame["shape"].str.split("x", expand=True).astype(int)
    frame = frame.assign(requests=sizes[0], queries=sizes[1], keys=sizes[2])
    frame = frame[(frame["requests"] == 1) & (frame["rows"] == "shuffled")]
    grid = sns.relplot(
        frame, kind="line", x="keys", y="median us", hue="variant", style="variant",
        col="queries", markers=True, dashes=False, height=3,
    )  # fmt: skip
    grid.set(ylabel="microseconds, median")
    _log_axes(grid)
    return "Building the mask of one request, keys of a row in any order", grid.figure


def _layout(frame: pd.DataFrame) -> tuple[str, Figure]:
    frame = frame[frame["variant"] != "floor"]
    grid = sns.catplot(
        frame, kind="bar", x="this / floor", y="shape", hue="variant", row="model",
        col="part", height=3, sharex="col", sharey=False,
    )  # fmt: skip
    grid.set_axis_labels("time over a copy of as many bytes", "tokens x heads")
    return "Laying out Q and K for MHA", grid.figure


def _first_call(frame: pd.DataFrame) -> tuple[str, Figure]:
    grid = sns.relplot(
        frame, x="length", y="first call ms", hue="variant", style="variant", height=3,
        aspect=1.8,
    )  # fmt: skip
    grid.set(yscale="log", xlabel="prompt tokens", ylabel="first call, ms")
    return "First mask of each prompt length", grid.figure


def _ttft(frame: pd.DataFrame) -> tuple[str, Figure]:
    grid = sns.relplot(
        frame, kind="line", x="prompt tokens", y="TTFT median ms", hue="variant",
        style="variant", col="at a time", markers=True, dashes=False, height=3,
    )  # fmt: skip
    grid.set(ylabel="time to first token, ms")
    _log_axes(grid)
    return f"vllm serve, {frame['model'].iloc[0]}", grid.figure


def _day(frame: pd.DataFrame) -> tuple[str, Figure]:
    frame = frame[frame["measure"].str.endswith(" ms")]
    grid = sns.relplot(
        frame, kind="line", x="rate", y="value", hue="variant", style="variant",
        col="measure", markers=True, dashes=False, height=2.6,
        facet_kws={"sharey": False},
    )  # fmt: skip
    grid.set(ylim=(0, None))
    grid.set_axis_labels("requests a second", "milliseconds")
    grid.set_titles("{col_name}")
    return f"A mix of requests, {frame['model'].iloc[0]}", grid.figure


def _profile(frame: pd.DataFrame) -> tuple[str, Figure]:
    groups = [*GROUPS, OTHER]
    frame = frame[frame["kernel"].isna() & frame["group"].isin(groups)]
    grid = sns.displot(
        frame, kind="hist", x="variant", weights="median ms", hue="group",
        hue_order=groups, multiple="stack", shrink=0.8, col="prompt tokens", height=3.5,
        aspect=0.8, facet_kws={"sharey": False}, palette="tab10", alpha=1,
    )  # fmt: skip
    grid.set_axis_labels("", "milliseconds on the GPU")
    return f"A prefill by kernels, {frame['model'].iloc[0]}", grid.figure


PLOTS = {
    "benchmark_sparse_mla_mask": _mask,
    "benchmark_masked_prefill": _prefill,
    "benchmark_topk_mask_build": _build,
    "benchmark_mha_layout": _layout,
    "benchmark_first_call": _first_call,
    "benchmark_serving_ttft": _ttft,
    "benchmark_serving_day": _day,
    "benchmark_prefill_profile": _profile,
}


def draw(path: Path, rows: Sequence[dict]) -> None:
    """Draw the rows of one benchmark, each with its origin, as text or as measured."""
    text = pd.DataFrame(rows).to_csv(index=False)
    frame = pd.read_csv(io.StringIO(text))  # numbers where the text is one
    script = Path(shlex.split(frame["command"].iloc[0])[1]).stem
    title, figure = PLOTS[script](frame)
    figure.suptitle(f"{title}: {frame['gpu'].iloc[0]}", y=1.02)
    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, bbox_inches="tight", metadata=dated)

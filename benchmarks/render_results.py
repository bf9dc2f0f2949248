# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fill in the tables of README and docs/results, and draw their plots.

    python3 benchmarks/render_results.py

A page is written by hand, but for what follows a comment with ``cog`` in it: there
cogapp puts what the code in the comment makes of the files beside the page, by the
functions of result_sections.py. A page ``NAME-GPU.md`` shows ``STEM-GPU*.csv`` and
``.jsonl``, or says that there is none. A plot is drawn from the CSV of the same name.
tests/test_results.py compares.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cogapp import Cog
from result_sections import Rows, steps_both_ways
from result_tables import PACKAGES, markdown, read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PROLOGUE = r"""
from render_results import Page, readme_results
from result_sections import *
from codegen_sections import *
from whole_model import assumptions, whole_model
page = Page.of(cog.inFile)
put = lambda text: cog.out(f"\n{text}\n\n")
"""


def pages() -> list[Path]:
    """What has parts to fill in."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "[[[cog" in page.read_text()]


def run_cog(files: Sequence[Path], *options: str) -> int:
    """Exit status of cogapp over files: ``-r`` writes, ``--check`` compares."""
    here = str(Path(__file__).parent)
    arguments = ["cog", "-I", here, "-p", PROLOGUE, *options, *map(str, files)]
    return Cog().main(arguments)


@dataclass(frozen=True)
class Page:
    """The results that a page shows."""

    folder: Path  # where its files lie
    gpu: str  # ending of their stems, such as ``h200``

    @classmethod
    def of(cls, path: str) -> "Page":
        """The page at `path`; README and docs/ show the H200's results."""
        file = Path(path).resolve()
        if file.parent in (ROOT, ROOT / "docs"):
            return cls(RESULTS, "h200")
        return cls(file.parent, file.stem.rpartition("-")[2])

    def on(self, gpu: str) -> "Page":
        """The same page with the results of another GPU."""
        return replace(self, gpu=gpu)

    def files(self, stem: str, suffix: str = ".csv") -> list[Path]:
        """Files of a benchmark on this GPU."""
        return sorted(self.folder.glob(f"{stem}-{self.gpu}*{suffix}"))

    def show(self, make: Callable[[Rows], str], *stems: str) -> str:
        """What `make` makes of the rows of a benchmark, or of several."""
        rows: list[dict] = []
        for stem in stems:
            rows += read_rows(self.files(stem))
            for file in self.files(stem, ".jsonl"):
                rows += [json.loads(line) for line in file.read_text().splitlines()]
        if not rows:
            return f"*Not measured: there is no `{stems[0]}-{self.gpu}`.*"
        return make(rows)

    def status(self, stem: str) -> str:
        """Whether a page with all files of this stem has any."""
        rows = read_rows(sorted(self.folder.glob(f"{stem}-*-{self.gpu}.csv")))
        if not rows:
            return (
                f"**Not run.** No {self.gpu.upper()} was at hand: nothing on this page "
                "was measured by this project. One command fills it in:"
            )
        return f"Made by one command on {rows[0]['gpu']}:"

    def origin(self, stem: str) -> str:
        """Where, when and how the rows of a benchmark came about."""
        names = [file.name for file in self.files(stem)]
        links = ", ".join(f"[{name}]({name})" for name in names)
        return self.show(
            lambda rows: f"{_origin(rows)} Rows: {links}.\n\n{_commands(rows)}", stem
        )

    def plot(self, stem: str) -> str:
        """The plots of a benchmark, which `main` draws."""
        return "\n\n".join(
            f"![{file.stem}]({file.with_suffix('.svg').name})"
            for file in self.files(stem)
        )


def _origin(rows: Rows) -> str:
    machines = dict.fromkeys(
        f"{row['gpu']}, driver {row['driver']}, "
        + ", ".join(f"{name} {row[name]}" for name in PACKAGES)
        + f"; {row['date']}."
        for row in rows
    )
    return " ".join(machines)


def _commands(rows: Rows) -> str:
    return "\n".join(("```sh", *dict.fromkeys(row["command"] for row in rows), "```"))


def _line(what: str, stock: float, ours: float, unit: str, page: str) -> dict:
    def digits(number: float) -> str:
        return f"{number:#.3g}".removesuffix(".")

    return {
        "what": what,
        "stock": f"{digits(stock)} {unit}",
        "here": f"{digits(ours)} {unit}",
        "times faster": digits(stock / ours),
        "": f"[page](docs/results/{page}-h200.md)",
    }


def _by_variant(page: Page, stem: str, column: str, place: dict) -> dict[str, float]:
    """A column of the rows of a place; rows that name no cache are of BF16 ones."""
    return {
        row["variant"]: float(row[column])
        for row in read_rows(page.files(stem))
        if place.items() <= ({"kv cache": "auto"} | row).items()
    }


def readme_results(page: Page) -> str:
    """Seven rows for the README, and their plot."""
    table = []
    steps = steps_both_ways(read_rows(page.files("masked-prefill")))
    place = {"model": "DeepSeek-V3.2", "heads": "16", "queries": "8192", "context": "0"}
    for cache, name in (("auto", "BF16"), ("fp8_ds_mla", "FP8")):
        step = next(
            s for s in steps if (place | {"kv cache": cache}).items() <= s.items()
        )
        what = f"prefill attention of a layer, 8192 tokens, 16 heads, {name} KV cache"
        table.append(_line(what, step["sparse"], step["masked"], "ms", "hopper"))
    place = {"model": "dsv32-16h", "prompt tokens": "8192", "at a time": "1"}
    for cache, name in (("auto", "BF16"), ("fp8", "FP8")):
        at = place | {"kv cache": cache}
        times = _by_variant(page, "serving-ttft", "TTFT median ms", at)
        what = f"`vllm serve`, time to first token, 4 layers, the same, {name} KV cache"
        table.append(_line(what, times["stock"], times["opt-in"], "ms", "serving"))
    for stem, place, what in (
        (
            "serving-multi-turn",
            {"turn tokens": "160", "measure": "turn: TTFT p50 ms"},
            "turns beside new prompts, median",
        ),
        (
            "serving-day",
            {"rate": "2", "measure": "TTFT p99 ms"},
            "mixed requests, 99th percentile",
        ),
    ):
        times = _by_variant(page, stem, "value", place)
        what = f"`vllm serve`, time to first token, 36 layers, {what}"
        table.append(_line(what, times["stock"], times["opt-in"], "ms", stem))
    place = {"shape": "1x4096x32768", "rows": "shuffled"}
    times = _by_variant(page, "topk-mask-build", "median us", place)
    what = "build a mask, 4096 queries x 32768 keys"
    table.append(_line(what, times["stock"], times["cutedsl"], "us", "topk-mask-build"))
    plot = "docs/results/masked-prefill-h200.svg"
    return f"{markdown(table)}\n\n![masked MHA against sparse MQA]({plot})"


def drawn_plots(files: Sequence[Path]) -> list[Path]:
    """The plots beside a CSV that the pages show."""
    return [
        csv.with_suffix(".svg")
        for page in files
        for csv in sorted(page.parent.glob("*.csv"))
        if f"({csv.stem}.svg)" in page.read_text()
    ]


def render(files: Sequence[Path]) -> None:
    """Write what cogapp fills into these pages, and their plots.

    Raises:
        RuntimeError: code in a page fails; cogapp has said where.
    """
    from plots import draw

    if run_cog(files, "-r"):
        raise RuntimeError("cogapp failed")
    for plot in drawn_plots(files):
        draw(plot, read_rows([plot.with_suffix(".csv")]))
        print(plot)


if __name__ == "__main__":
    render(pages())

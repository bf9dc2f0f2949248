# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make the pages in docs/results and the README's result table from the CSVs there.

    python3 benchmarks/render_results.py

A page ``NAME-GPU.md`` shows the files ``NAME-GPU*.csv`` of its sections; there is none
where those of the first section are missing. The page of ``masked-prefill-h200.csv`` is
called ``hopper-h200.md``. A plot beside a CSV, of the same name, is shown;
plots that can be drawn from their CSV and are missing are drawn, if matplotlib is
there. By hand is written only what stands between a page's `NOTES` markers, which is
kept: tests/test_results.py compares the pages and the README with what this program
makes of the CSVs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import benchmark_first_call
import benchmark_masked_prefill
import benchmark_sparse_mla_mask
from bench_common import PACKAGES
from result_tables import markdown, pivot, read_rows
from thresholds import MASKED, RATIO, crossovers, derive_thresholds, to_source

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTES = ("<!-- notes:begin -->", "<!-- notes:end -->")
HEADER = (
    "<!-- SPDX-License-Identifier: Apache-2.0 -->\n"
    "<!-- Made by benchmarks/render_results.py; do not edit. -->\n"
)
GPUS = ("h200", "b200")
PAGE_NAMES = {
    "masked-prefill-h200": "hopper-h200",  # the page of the Hopper opt-in
    "serving-ttft-h200": "serving-h200",
}
ORIGIN = ("gpu", "driver", *PACKAGES, "date", "command")

Rows = Sequence[dict]


@dataclass(frozen=True)
class Section:
    """What a page shows of one benchmark.

    Attributes:
        files: stem of its CSV files; the GPU's name and anything may follow.
        heading: of the section.
        body: Markdown made of the rows.
        draw: makes the plot from the rows, where that is possible later.
    """

    files: str
    heading: str
    body: Callable[[Rows], str]
    draw: Callable[[Path, Rows], None] | None = None


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _numbers(rows: Rows) -> list[dict]:
    return [{name: _number(text) for name, text in row.items()} for row in rows]


def plain_body(rows: Rows) -> str:
    """Every column but those of the origin."""
    return markdown(
        [{name: v for name, v in row.items() if name not in ORIGIN} for row in rows]
    )


def mask_times(rows: Rows) -> str:
    """Milliseconds of each callback."""
    table = pivot(
        rows, ("shape", "density"), "variant", benchmark_sparse_mla_mask.time_cell
    )
    return (
        "Milliseconds, and % over unmasked. A shape is requests x queries x keys / "
        "heads / mask; 192/128 dimensions unless it ends in 256.\n\n" + markdown(table)
    )


def mask_body(rows: Rows) -> str:
    """Milliseconds of each callback, and ours in detail."""
    names = ("shape", "median us", "p10 us", "p90 us", "TFLOP/s", "GB/s",
             "checked against")  # fmt: skip
    ours = [row for row in rows if row["variant"] == benchmark_sparse_mla_mask.OURS]
    details = f"Ours in detail. {benchmark_sparse_mla_mask.FORMULAS}."
    table = markdown([{name: row[name] for name in names} for row in ours])
    return "\n\n".join((mask_times(rows), details, table))


def prefill_body(rows: Rows) -> str:
    """Times of all ways, crossovers and thresholds."""
    spread = [
        {
            "model": row["model"],
            "shape": f"{row['queries']}+{row['context']}",
            "heads": row["heads"],
            "way": row["way"],
            "p10 to p90 us": f"{row['p10 us']} to {row['p90 us']}",
            "TFLOP/s": row["TFLOP/s"],
            "GB/s": row["GB/s"],
            "differs by": row["relative difference"],
        }
        for row in rows
    ]
    source = to_source(derive_thresholds(rows))
    return "\n\n".join(
        (
            f"Milliseconds, and how many times {MASKED}'s. Everything from queries, "
            "latents, paged cache and top-k rows to the output of all heads.",
            markdown(
                pivot(
                    rows,
                    benchmark_masked_prefill.INDEX,
                    "way",
                    benchmark_masked_prefill.cell,
                )
            ),
            "Length at which a pure prefill takes the same time both ways:",
            markdown(crossovers(rows)),
            "Thresholds derived from these rows:",
            f"```text\n{source}\n```",
            f"Spread. {benchmark_masked_prefill.FORMULAS}.",
            markdown(spread),
        )
    )


def build_body(rows: Rows) -> str:
    """Microseconds of each builder."""
    return "Median microseconds.\n\n" + markdown(
        pivot(rows, ("shape", "rows"), "variant", lambda row: row["median us"])
    )


def _first_call_summary(rows: Rows) -> list[dict]:
    return benchmark_first_call.summarise(_numbers(rows))


def first_call_body(rows: Rows) -> str:
    """A summary of each builder's first calls."""
    return markdown(
        [
            {
                name: f"{value:.3f}" if isinstance(value, float) else value
                for name, value in row.items()
            }
            for row in _first_call_summary(rows)
        ]
    )


PAGES: dict[str, tuple[str, tuple[Section, ...]]] = {
    "mask": (
        "The mask inside FlashAttention-4",
        (
            Section(
                "mask",
                "Masked attention",
                mask_body,
                benchmark_sparse_mla_mask.draw,
            ),
        ),
    ),
    "masked-prefill": (
        "Masked MHA against sparse MQA",
        (
            Section(
                "masked-prefill",
                "Prefill attention of one layer",
                prefill_body,
                benchmark_masked_prefill.draw,
            ),
            Section("mask", "What the mask costs inside FlashAttention-4", mask_times),
        ),
    ),
    "topk-mask-build": (
        "Building the mask",
        (Section("topk-mask-build", "Time of one mask", build_body),),
    ),
    "first-call": (
        "The first prompt of each length",
        (Section("first-call", "First calls", first_call_body),),
    ),
    "serving": (
        "Serving",
        (
            Section("serving-ttft", "Time to first token", plain_body),
            Section("serving-load", "Two minutes of load", plain_body),
        ),
    ),
}


def _files(folder: Path, stem: str, gpu: str) -> list[Path]:
    return sorted(folder.glob(f"{stem}-{gpu}*.csv"))


def _section(section: Section, files: list[Path]) -> str:
    rows = read_rows(files)
    first = rows[0]
    packages = ", ".join(f"{name} {first[name]}" for name in PACKAGES)
    commands = "\n".join(dict.fromkeys(row["command"] for row in rows))
    dates = ", ".join(dict.fromkeys(row["date"] for row in rows))
    links = "Rows: " + ", ".join(f"[{file.name}]({file.name})" for file in files)
    plots = [file.with_suffix(".png") for file in files]
    parts = [
        f"## {section.heading}",
        f"{first['gpu']}, driver {first['driver']}, {packages}; {dates}. {links}.",
        f"```sh\n{commands}\n```",
        *(f"![{section.heading}]({plot.name})" for plot in plots if plot.exists()),
        section.body(rows),
    ]
    return "\n\n".join(parts)


def _page_name(name: str, gpu: str) -> str:
    return PAGE_NAMES.get(f"{name}-{gpu}", f"{name}-{gpu}")


def _notes(page: Path) -> str:
    """What was written into a page by hand, between its markers."""
    begin, end = NOTES
    text = page.read_text() if page.exists() else ""
    notes = text.split(begin)[1].split(end)[0].strip() if begin in text else ""
    return "\n".join(filter(None, (begin, notes, end)))


def make_pages(folder: Path) -> dict[Path, str]:
    """Text of every page whose CSVs are in `folder`."""
    pages = {}
    for gpu in GPUS:
        for name, (title, sections) in PAGES.items():
            found = [(s, _files(folder, s.files, gpu)) for s in sections]
            parts = [_section(s, files) for s, files in found if files]
            if found[0][1]:
                page = folder / f"{_page_name(name, gpu)}.md"
                head = f"{HEADER}\n# {title}: {gpu.upper()}"
                pages[page] = "\n\n".join((head, _notes(page), *parts)) + "\n"
    return pages


def draw_missing_plots(folder: Path) -> None:
    """Draw the plots that a CSV suffices for and that are not there."""
    for _, sections in PAGES.values():
        for section in sections:
            for gpu in GPUS:
                for file in _files(folder, section.files, gpu):
                    plot = file.with_suffix(".png")
                    if section.draw is not None and not plot.exists():
                        section.draw(plot, read_rows([file]))


def _ms(row: dict) -> float:
    return float(row["median us"]) / 1e3


def _line(what: str, baseline: str, ours: str, gain: str, page: str) -> dict:
    return {
        "what": what,
        "baseline": baseline,
        "here": ours,
        "change": gain,
        "page": f"[{page}](docs/results/{_page_name(page, 'h200')}.md)",
    }


def _mask_lines(rows: Rows) -> list[dict]:
    times = {(row["shape"], row["variant"]): row for row in rows}
    lines = []
    for shape, what in (
        ("1x1024x8192/8/ones", "FA4, 1024 x 8192, 8 heads, mask of all keys"),
        ("1x4096x32768/8/ones", "FA4, 4096 x 32768, 8 heads, mask of all keys"),
        ("1x4096x4096/16/ones/causal", "FA4, causal 4096, 16 heads"),
        ("1x8192x8192/16/ones/causal", "FA4, causal 8192, 16 heads"),
    ):
        if (shape, "ours") not in times:
            continue
        ours = _ms(times[shape, "ours"])
        for name in ("unmasked", "one key", "stock"):
            if (shape, name) in times:
                other = _ms(times[shape, name])
                gain = f"{100 * (ours / other - 1):+.1f} %"
                columns = (f"{name} {other:.4f} ms", f"{ours:.4f} ms", gain, "mask")
                lines.append(_line(what, *columns))
    return lines


def _prefill_lines(rows: Rows) -> list[dict]:
    lines = []
    for ranks, queries in ((8, 4096), (8, 8192), (8, 16384), (1, 4096), (1, 8192)):
        found = {
            row["way"]: row
            for row in rows
            if row["model"] == "DeepSeek-V3.2"
            and (int(row["ranks"]), int(row["queries"])) == (ranks, queries)
            and int(row["context"]) == 0
        }
        others = [row for way, row in found.items() if "MQA" in way or "MLA" in way]
        if MASKED not in found or not others:
            continue
        best = min(others, key=_ms)
        heads = found[MASKED]["heads"]
        lines.append(
            _line(
                f"prefill attention of a layer, {queries} tokens, {heads} heads",
                f"{best['way']} {_ms(best):.3f} ms",
                f"{_ms(found[MASKED]):.3f} ms",
                f"{float(best[RATIO]):.1f} times faster",
                "masked-prefill",
            )
        )
    return lines


def _build_lines(rows: Rows) -> list[dict]:
    times = {(row["shape"], row["rows"], row["variant"]): row for row in rows}
    lines = []
    for shape in ("1x4096x8192", "1x4096x32768"):
        keys = [(shape, "shuffled", name) for name in ("stock", "cutedsl")]
        if all(key in times for key in keys):
            stock, ours = (float(times[key]["median us"]) for key in keys)
            lines.append(
                _line(
                    f"build a mask, {shape[2:].replace('x', ' x ')}",
                    f"stock {stock:.1f} us",
                    f"{ours:.1f} us",
                    f"{stock / ours:.1f} times faster",
                    "topk-mask-build",
                )
            )
    return lines


def _first_call_lines(rows: Rows) -> list[dict]:
    found = {row["variant"]: row for row in _first_call_summary(rows)}
    if not {"stock", "cutedsl"} <= set(found):
        return []
    median = "first call ms, median"
    stock, ours = found["stock"], found["cutedsl"]
    return [
        _line(
            f"first mask of each of {stock['lengths']} prompt lengths",
            f"stock {stock[median]:.1f} ms, {stock['compilations']} compilations",
            f"{ours[median]:.3f} ms, {ours['compilations']} compilations",
            f"{stock[median] / ours[median]:.0f} times faster",
            "first-call",
        )
    ]


def _ttft_lines(rows: Rows) -> list[dict]:
    place = {"model": "dsv32-16h", "prompt tokens": "8192", "at a time": "1"}
    found = {
        row["variant"]: float(row["TTFT median ms"])
        for row in rows
        if all(row[name] == value for name, value in place.items())
    }
    if not {"stock", "opt-in"} <= set(found):
        return []
    stock, ours = found["stock"], found["opt-in"]
    return [
        _line(
            "`vllm serve`, time to first token, 4 layers, 8192 tokens, 16 heads",
            f"stock {stock:.1f} ms",
            f"{ours:.1f} ms",
            f"{stock / ours:.2f} times faster",
            "serving-ttft",
        )
    ]


def make_readme_table(folder: Path) -> str:
    """The README's result table, empty without results."""
    lines = []
    for stem, make in (
        ("mask", _mask_lines),
        ("masked-prefill", _prefill_lines),
        ("serving-ttft", _ttft_lines),
        ("topk-mask-build", _build_lines),
        ("first-call", _first_call_lines),
    ):
        files = _files(folder, stem, "h200")
        if files:
            lines += make(read_rows(files))
    return markdown(lines) if lines else ""


def readme_block(text: str) -> str:
    """What stands between the README's markers.

    Raises:
        ValueError: the markers are missing or in another order.
    """
    if not 0 <= text.find(BEGIN) < text.find(END):
        raise ValueError(f"README.md must have {BEGIN} and, after it, {END}")
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    try:
        draw_missing_plots(RESULTS)
    except ImportError as error:
        print(f"plots are not drawn: {error}", file=sys.stderr)
    for page, text in make_pages(RESULTS).items():
        page.write_text(text)
        print(page.relative_to(ROOT))
    text = README.read_text()
    table = make_readme_table(RESULTS)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    block = "\n".join(filter(None, (BEGIN, table, END)))
    README.write_text(before + block + after)


if __name__ == "__main__":
    main()

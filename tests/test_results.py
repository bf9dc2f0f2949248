# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pages, plots and README say what the files of docs/results say."""

import csv
import re
from pathlib import Path

import plots
import pytest
from fit_estimate import fit, read_measured
from render_results import RESULTS, ROOT, drawn_plots, pages, run_cog
from result_sections import upstream_ways
from result_tables import PACKAGES, markdown, pivot, read_rows
from thresholds import MASKED, RATIO

from vllm_sparse_mla.testing.stock import load_file

RENDER = "run python3 benchmarks/render_results.py"
PAGES = pages()
ORIGIN = {
    **{name: "1.0" for name in ("driver", "date", *PACKAGES)},
    "gpu": "NVIDIA H100",
    "command": "python3 benchmarks/benchmark_masked_prefill.py --csv x.csv",
}
STEP = {
    "model": "DeepSeek-V3.2", "dims": "192/128", "ranks": 8, "heads": 16,
    "queries": 4096, "context": 0,
}  # fmt: skip


def write(path: Path, rows: list[dict]) -> None:
    rows = [row | ORIGIN for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def page(tmp_path):
    """A page for a GPU that has the rows of two benchmarks, and shows three."""
    write(
        tmp_path / "masked-prefill-h100.csv",
        [
            STEP | {"way": way, "median us": us, RATIO: us / 200}
            for way, us in (
                (MASKED, 200.0),
                ("FLASHMLA_SPARSE", 1200.0),
                ("FLASH_ATTN_MLA_SPARSE", 900.0),
            )
        ],
    )
    write(
        tmp_path / "mask-h100.csv",
        [
            {"shape": "1x1024x8192/8/ones", "density": 1.0, "variant": name}
            | {"median us": us, "this / unmasked": us / 100}
            for name, us in (("unmasked", 100.0), ("one key", 300.0), ("ours", 125.0))
        ],
    )
    code = (
        'page.origin("masked-prefill")',
        'page.plot("masked-prefill")',
        'page.show(prefill_times, "masked-prefill")',
        'page.show(mask_times, "mask")',
        'page.show(ttft, "serving-ttft")',
    )
    path = tmp_path / "report-h100.md"
    path.write_text(
        "".join(f"<!-- [[[cog put({c}) ]]] -->\n<!-- [[[end]]] -->\n" for c in code)
    )
    return path


def test_a_page_is_filled_in_from_the_files_beside_it(page):
    assert run_cog([page], "-r") == 0
    text = page.read_text()
    assert "NVIDIA H100, driver 1.0, vllm 1.0" in text and ORIGIN["command"] in text
    assert "0.200 / 0.900 (4.50)" in text  # the better of the two backends
    assert "0.1250 (+25.0 %)" in text
    assert "![masked-prefill-h100](masked-prefill-h100.svg)" in text
    assert "*Not measured: there is no `serving-ttft-h100`.*" in text


def test_a_page_that_says_otherwise_is_found(page):
    run_cog([page], "-r")
    assert run_cog([page], "--check") == 0
    page.write_text(page.read_text().replace("4.50", "5.50"))
    assert run_cog([page], "--check") != 0


def test_a_plot_says_what_gpu_and_what_benchmark(page, tmp_path):
    rows = read_rows([page.with_name("masked-prefill-h100.csv")])
    plots.draw(tmp_path / "plot.svg", rows)
    text = (tmp_path / "plot.svg").read_text()
    assert "one layer: NVIDIA H100" in text and "DeepSeek-V3.2, 16 heads" in text
    assert ">4.5<" in text


def test_a_table_keeps_the_order_of_the_rows():
    rows = [
        {"name": name, "variant": variant, "value": f"{name}{variant}"}
        for name, variant in (("z", "b"), ("z", "a"), ("a", "a"))
    ]
    table = pivot(rows, ("name",), "variant", lambda row: row["value"])
    assert table == [
        {"name": "z", "b": "zb", "a": "za"},
        {"name": "a", "b": "-", "a": "aa"},
    ]
    lines = [re.sub(r"\s+", " ", line) for line in markdown(table).splitlines()]
    assert lines[0] == "| name | b | a |" and lines[3] == "| a | - | aa |"


def test_upstreams_own_benchmark_is_a_column_for_each_way():
    rows = [
        {"backend": f"B_{way}", "batch_spec": "q4096", "mean_time": time}
        for way, time in (("masked_mha", "0.0002238"), ("mqa", "0.0019681"))
    ]
    table = re.sub(r"\s+", " ", upstream_ways(rows))
    assert "| B_masked_mha | B_mqa |" in table
    assert "| q4096 | 0.2238 | 1.9681 |" in table


def test_every_file_of_results_is_shown():
    text = "".join(path.read_text() for path in PAGES)
    files = {path.name for path in RESULTS.iterdir()} - {path.name for path in PAGES}
    assert [name for name in sorted(files) if name not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_agree_with_the_files(page):
    assert run_cog([page], "--check") == 0, f"{page} differs from its files: {RENDER}"


@pytest.mark.parametrize("plot", drawn_plots(PAGES), ids=lambda plot: plot.name)
def test_plots_agree_with_the_files(plot, tmp_path):
    plots.draw(tmp_path / plot.name, read_rows([plot.with_suffix(".csv")]))
    again = (tmp_path / plot.name).read_text()
    assert plot.exists() and plot.read_text() == again, f"{plot.name}: {RENDER}"


def test_hopper_coefficients_are_those_of_the_measured_steps():
    in_force = load_file(
        ROOT / "vllm/model_executor/layers/attention/sparse_mla_h200.py"
    )
    steps = read_measured(read_rows(sorted(RESULTS.glob("prefill-fit-h200*.csv"))))
    fitted = fit("NVIDIA H200", [step for step in steps if not step.is_kept])
    assert fitted == in_force.COSTS


def test_the_picture_of_a_mask_row_is_the_scripts(tmp_path):
    picture = ROOT / "docs/mask_row.svg"
    load_file(ROOT / "docs/mask_row.py").draw(tmp_path / picture.name)
    assert (tmp_path / picture.name).read_text() == picture.read_text()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pages, README and CSVs of results say the same, and so does the table in force."""

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import render_results  # noqa: E402
from result_tables import read_rows  # noqa: E402
from thresholds import derive_thresholds  # noqa: E402

RENDER = "run python3 benchmarks/render_results.py"
ORIGIN = {
    **{name: "1.0" for name in render_results.ORIGIN},
    "gpu": "NVIDIA H200",
    "command": "python3 benchmarks/benchmark_x.py --csv x.csv",
}
CASE = {"model": "DeepSeek-V3.2", "dims": "192/128", "ranks": 8, "heads": 16}
TIMES = {"p10 us": 1.0, "p90 us": 1.0, "TFLOP/s": 1.0, "GB/s": 1.0}


def write(path: Path, rows: list[dict]) -> None:
    rows = [row | ORIGIN for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path):
    """Made-up results of every benchmark."""
    mask = {"shape": "1x1024x8192/8/ones", "density": 1.0} | TIMES
    write(
        tmp_path / "mask-h200.csv",
        [
            mask
            | {"variant": name, "median us": us, "this / unmasked": us / 100}
            | {"checked against": "one key: identical"}
            for name, us in (("unmasked", 100.0), ("one key", 300.0), ("ours", 125.0))
        ],
    )
    prefill = CASE | {"queries": 4096, "context": 0, "relative difference": "1e-3"}
    write(
        tmp_path / "masked-prefill-h200.csv",
        [
            prefill | TIMES | {"way": way, "median us": us, render_results.RATIO: ratio}
            for way, us, ratio in (
                (render_results.MASKED, 200.0, 1.0),
                ("FLASH_ATTN_MLA_SPARSE", 900.0, 4.5),
                ("FLASHMLA_SPARSE", 1200.0, 6.0),
            )
        ],
    )
    write(
        tmp_path / "topk-mask-build-h200.csv",
        [
            {"shape": "1x4096x8192", "rows": "shuffled", "variant": name}
            | {"median us": us}
            for name, us in (("stock", 100.0), ("cutedsl", 20.0))
        ],
    )
    write(
        tmp_path / "first-call-h200.csv",
        [
            {"length": length, "variant": name, "first call ms": ms}
            | {"later calls ms": 0.1, "compilations": compiled}
            for name, ms, compiled in (("stock", 110.0, 1), ("cutedsl", 0.5, 0))
            for length in (3001, 4001)
        ],
    )
    ttft = {"model": "dsv32-16h", "prompt tokens": 8192, "at a time": 1}
    write(
        tmp_path / "serving-ttft-h200.csv",
        [
            ttft | {"variant": variant, "TTFT median ms": ms}
            for variant, ms in (("stock", 40.0), ("opt-in", 32.0))
        ],
    )
    return tmp_path


def test_every_csv_has_its_page(folder):
    pages = render_results.make_pages(folder)
    assert [page.name for page in pages] == [
        "mask-h200.md",
        "hopper-h200.md",
        "topk-mask-build-h200.md",
        "first-call-h200.md",
        "serving-h200.md",
    ]
    for text in pages.values():
        assert ORIGIN["command"] in text and "NVIDIA H200" in text
    by_name = {page.name: text for page, text in pages.items()}
    assert "0.1250 (+25.0 %)" in by_name["mask-h200.md"]
    assert "0.900 (4.50 x)" in by_name["hopper-h200.md"]
    assert "0.1250 (+25.0 %)" in by_name["hopper-h200.md"]


def test_readme_table_is_made_of_the_rows(folder):
    table = render_results.make_readme_table(folder)
    for text in (
        "| unmasked 0.1000 ms | 0.1250 ms | +25.0 % |",
        "| one key 0.3000 ms | 0.1250 ms | -58.3 % |",
        "| FLASH_ATTN_MLA_SPARSE 0.900 ms | 0.200 ms | 4.5 times faster |",
        "| stock 40.0 ms | 32.0 ms | 1.25 times faster | [serving-ttft](docs/results/",
        "| stock 100.0 us | 20.0 us | 5.0 times faster |",
        "| stock 110.0 ms, 2 compilations | 0.500 ms, 0 compilations |",
        "[masked-prefill](docs/results/hopper-h200.md)",
    ):
        assert text in table


def test_notes_are_kept(folder):
    begin, end = render_results.NOTES
    page = folder / "serving-h200.md"
    page.write_text(f"{begin}\nwhat was seen beside the rows\n{end}\n")
    assert (
        f"{begin}\nwhat was seen beside the rows\n{end}"
        in (render_results.make_pages(folder)[page])
    )


def test_a_plot_is_shown(folder):
    (folder / "mask-h200.png").touch()
    pages = render_results.make_pages(folder)
    assert "](mask-h200.png)" in pages[folder / "mask-h200.md"]


def test_pages_agree_with_the_csvs():
    for page, text in render_results.make_pages(render_results.RESULTS).items():
        assert page.exists(), f"{page.name} is missing: {RENDER}"
        assert page.read_text() == text, f"{page.name} differs from its CSV: {RENDER}"


def test_readme_agrees_with_the_csvs():
    block = render_results.readme_block(render_results.README.read_text())
    table = render_results.make_readme_table(render_results.RESULTS)
    assert block == table, f"README.md differs from docs/results: {RENDER}"


def test_hopper_thresholds_are_the_measured_ones():
    files = sorted(render_results.RESULTS.glob("masked-prefill-h200*.csv"))
    if not files:
        pytest.skip("docs/results has no masked-prefill-h200.csv")
    from vllm.model_executor.layers.attention import sparse_mla_sm90

    measured = derive_thresholds(read_rows(files))
    assert measured == sparse_mla_sm90.SM90_MASKED_MHA_THRESHOLDS

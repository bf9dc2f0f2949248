# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the benchmarks share, on a machine without a GPU."""

import csv

import pytest
from bench_common import CheckFailed, measure_all, with_progress


def measure(case: str) -> list[dict]:
    if case == "wrong":
        raise CheckFailed("outputs differ")
    return [{"case": case, "us": 1.5}, {"case": case, "us": 2.5}]


def test_progress_is_silent_in_a_pipe(capsys):
    assert list(with_progress(iter("abc"), "letters")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_a_case_that_fails_its_check_is_left_out(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    rows, failed = measure_all(["a", "wrong", "b"], measure, file)
    assert [row["case"] for row in rows] == ["a", "a", "b", "b"]
    assert failed == 1
    assert capsys.readouterr().err == "wrong is not timed: outputs differ\n"
    with file.open(newline="") as text:
        assert [row["us"] for row in csv.DictReader(text)] == ["1.500", "2.500"] * 2


def test_the_csv_keeps_what_was_measured_before_an_error(tmp_path):
    def fail(case):
        if case == "b":
            raise RuntimeError("out of memory")
        return measure(case)

    file = tmp_path / "rows.csv"
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_all(["a", "b"], fail, file)
    assert len(file.read_text().splitlines()) == 3


def test_no_case_is_begun_after_the_time_limit(tmp_path, capsys):
    assert measure_all(["a", "b"], measure, None, time_limit=-1.0) == ([], 0)
    assert "after 0 cases" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The comparison with other people's tests, on suites made up here."""

import tomllib

import pytest

from tests.external import external
from tests.external.external import (
    Suite,
    compare,
    importers_of_replaced_modules,
    run,
    with_named_tests,
)

A_TEST = "tests/test_a.py::test_it[x::y-1]"


@pytest.fixture
def make_suite(tmp_path):
    """Function that writes a suite of one file."""

    def make(text: str) -> Suite:
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests/test_a.py").write_text(text)
        return Suite("made-up", tmp_path, ["tests/test_a.py"])

    return make


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("import vllm.vllm_flash_attn.cute.mask as m", True),
        ("from vllm.vllm_flash_attn.cute.mask import AttentionMask", True),
        ("from vllm.vllm_flash_attn.cute import utils, mask", True),
        (
            "from vllm.vllm_flash_attn.cute import (\n    block_info,\n    mask,\n)",
            True,
        ),
        (
            'monkeypatch.setattr("vllm.vllm_flash_attn.cute.mask.AttentionMask", 1)',
            True,
        ),
        ("from vllm.vllm_flash_attn.cute import masks, block_info", False),
        ("from vllm.vllm_flash_attn.cute import block_info\nmask = 1", False),
    ],
)
def test_files_that_import_what_is_replaced_are_found(make_suite, text, is_one):
    suite = make_suite(text)
    # On SM100 nothing replaces FA4's mask.py, but the list is the same everywhere.
    assert importers_of_replaced_modules(suite.folder) == suite.tests * is_one


def test_a_suite_runs_those_of_its_tests_that_are_named(make_suite, tmp_path):
    suite, other = make_suite(""), Suite("other", tmp_path / "other", ["tests/all.py"])
    named = [A_TEST, "tests/test_a.py::test_too"]
    assert [s.tests for s in with_named_tests([other, suite], named)] == [
        other.tests,
        named,
    ]
    assert with_named_tests([suite, other], []) == [suite, other]
    with pytest.raises(ValueError, match="no suite has .*test_b"):
        with_named_tests([suite, other], [*named, "tests/test_b.py"])


@pytest.mark.processes
def test_a_suite_runs_in_the_variant_that_is_asked_for(make_suite, tmp_path):
    suite = make_suite(
        "import pytest\n"
        "from vllm.model_executor.layers.attention import sparse_mla_attention as m\n"
        "class TestIt:\n"
        "    @pytest.mark.parametrize('x', ['a::b.c'])\n"
        "    def test_stock(self, x): assert not hasattr(m, '_upstream')\n"
        "def test_skipped(): pytest.skip('why')\n"
    )
    stock, here = (
        run(suite, variant, suite.tests, 0, tmp_path / f"{variant}.log")
        for variant in ("stock", "overlay")
    )
    names = ("TestIt::test_stock[a::b.c]", "test_skipped")
    tests = [f"tests/test_a.py::{name}" for name in names]
    assert stock == dict(zip(tests, ("passed", "skipped")))
    assert here == dict(zip(tests, ("failure", "skipped")))


@pytest.mark.processes
def test_what_did_not_run_is_an_error(make_suite, tmp_path):
    suite = make_suite("")
    with pytest.raises(RuntimeError, match="pytest ended with 5"):
        run(suite, "stock", suite.tests, 0, tmp_path / "none.log")


@pytest.fixture
def compare_outcomes(monkeypatch, tmp_path, capsys):
    """Function that compares made-up outcomes: differences, what was printed."""

    def compare_them(*runs: dict[str, str], why: dict[str, str] | None = None):
        answers = iter(runs)
        monkeypatch.setattr(external, "run", lambda *args: next(answers))
        monkeypatch.setattr(external, "read_explained", lambda *args: why or {})
        suite = Suite("made-up", tmp_path, [])
        found = compare(suite, ["stock", "overlay"], 0, tmp_path)
        assert list(answers) == []
        return found, capsys.readouterr().out

    return compare_them


PASSED, FAILED = {A_TEST: "passed"}, {A_TEST: "failure"}


@pytest.mark.parametrize(
    ("runs", "differences", "said"),
    [
        ([PASSED, PASSED], 0, ""),
        ([FAILED, FAILED], 0, ""),
        ([PASSED, FAILED, PASSED, FAILED], 1, "failure, in stock passed: nothing"),
        ([FAILED, PASSED, FAILED, PASSED], 1, "passed, in stock failure: nothing"),
        ([PASSED, {}, PASSED, {}], 1, "None, in stock passed"),
        ([PASSED, FAILED, PASSED, PASSED], 0, "does not alone"),
    ],
)
def test_each_test_is_compared(compare_outcomes, runs, differences, said):
    found, printed = compare_outcomes(*runs)
    assert found == differences
    assert said in printed


@pytest.mark.parametrize("test", [A_TEST, A_TEST.partition("[")[0]])
def test_an_explained_difference_is_none(compare_outcomes, test):
    runs = [PASSED, FAILED, PASSED, FAILED]
    found, printed = compare_outcomes(*runs, why={test: "so it is"})
    assert found == 0 and "so it is" in printed


def test_explanations_are_of_suites_and_variants_that_there_are():
    rows = tomllib.loads((external.HERE / "explained.toml").read_text())["explained"]
    for row in rows:
        assert row["suite"] in ("vllm", "fa4")
        assert row["variants"] and set(row["variants"]) <= set(external.VARIANTS)
        assert row["test"].startswith("tests/") and row["why"]

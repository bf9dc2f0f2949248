# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs other people's tests, on stock vLLM first and then here, and compares.

vLLM's own tests of the modules that are replaced or edited, from its source
distribution, and FlashAttention-4's own of masks, on the FA4 inside vLLM:

    make test-external                                          # vLLM's, on a CPU
    make test-external ARGS="--gpu --fa4 flash-attention"       # both, on a GPU

Without network: ``VLLM_SOURCE=FOLDER python3 tests/external/external.py --gpu``; of the
source distribution only ``tests/`` is needed. Arguments name files or tests of either
suite, from its folder ``tests`` on. A suite of which none is named runs FA4's files of
masks, or those of vLLM's that import a module which is replaced or edited.

Each test has an outcome in each variant. Those whose outcome is not stock's are run
again, alone: that settles what came from many tests at once. Ends with 1 where an
outcome still differs and explained.toml does not say why.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_sparse_mla.guard import EDITED_FILES, OVERLAID_FILES
from vllm_sparse_mla.tables import make_console, make_table

HERE = Path(__file__).resolve().parent
VARIANTS = {
    "stock": {"VLLM_PLUGINS": "", "VLLM_SPARSE_MLA_SM90": "0"},
    "overlay": {"VLLM_SPARSE_MLA_STRICT": "1", "VLLM_SPARSE_MLA_SM90": "0"},
    "opt-in": {"VLLM_SPARSE_MLA_STRICT": "1", "VLLM_SPARSE_MLA_SM90": "1"},
}
MASK_TESTS = "tests/cute/test_mask_mod*.py"
# As long as a list of tests may be on a command line.
MOST_AGAIN = 200

Outcomes = Mapping[str, str]


@dataclass(frozen=True)
class Suite:
    """Tests of one project."""

    name: str  # of the project
    folder: Path  # holds ``tests``
    tests: Sequence[str]  # files or tests below ``folder``


def importers_of_replaced_modules(source: Path) -> list[str]:
    """Test files of vLLM's that import a module which is replaced or edited."""
    modules = [f.module for f in OVERLAID_FILES + EDITED_FILES if f.sha256 is not None]
    pattern = "|".join(
        rf"\b{package}(?:\.| import (?:\([\w\s,]*?|[\w ,]*?)\b){name}\b"
        for package, _, name in (module.rpartition(".") for module in modules)
    )
    return [
        path.relative_to(source).as_posix()
        for path in sorted((source / "tests").rglob("test_*.py"))
        if re.search(pattern, path.read_text())
    ]


def with_named_tests(suites: Sequence[Suite], tests: Sequence[str]) -> list[Suite]:
    """The suites, each with those of the tests that are its own, if any.

    Raises:
        ValueError: no suite has a file that a test is said to be in.
    """
    found = []
    for suite in suites:
        own = [t for t in tests if (suite.folder / t.partition("::")[0]).is_file()]
        found.append(replace(suite, tests=own or suite.tests))
        tests = [t for t in tests if t not in own]
    if tests:
        raise ValueError(f"no suite has {tests}")
    return found


def run(
    suite: Suite, variant: str, tests: Sequence[str], workers: int, log: Path
) -> dict[str, str]:
    """Run tests in one variant; outcome by test.

    Args:
        suite: whose tests.
        variant: one of ``VARIANTS``.
        tests: as pytest takes them.
        workers: processes; 0 is this one's child alone.
        log: gets what pytest prints; its report lies beside it.

    Raises:
        RuntimeError: pytest did not come to an end, or took the tests for none.
    """
    report = log.with_suffix(".xml")
    with tempfile.TemporaryDirectory() as folder:
        # Not in the suite's own folder: its sources would hide the installed package.
        Path(folder, "tests").symlink_to(suite.folder.resolve() / "tests")
        path = [folder, str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(path), "EXTERNAL": variant}
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull]
        command += ["--rootdir", folder, "-p", "in_force", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", "-W", "ignore", "--tb", "short"]
        command += ["-o", "junit_family=xunit1", "--junitxml", str(report.resolve())]
        if workers:
            command += ["-n", str(workers), "--dist", "worksteal"]
        with log.open("w") as out:
            done = subprocess.run(
                [*command, *tests],
                cwd=folder,
                env=os.environ | VARIANTS[variant] | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
    # 1 is for tests that failed and for files that could not be imported.
    if done.returncode not in (0, 1) or not report.exists():
        end = "\n".join(log.read_text().splitlines()[-20:])
        raise RuntimeError(f"pytest ended with {done.returncode}. {log} ends:\n{end}")
    return read_report(report)


def read_report(report: Path) -> dict[str, str]:
    """Outcome of each test in a JUnit report of pytest's."""
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        module = case.get("file", "").removesuffix(".py").replace("/", ".")
        below = case.get("classname", "").removeprefix(module).strip(".")
        parts = (case.get("file"), *below.split("."), case.get("name"))
        found = [child.tag for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped") is not None
        outcome = found[0] if found else "skipped" if skipped else "passed"
        outcomes["::".join(filter(None, parts))] = outcome
    return outcomes


def differing(stock: Outcomes, here: Outcomes) -> list[str]:
    """Tests whose outcomes are not the same; one that is missing has none."""
    return [t for t in {**stock, **here} if stock.get(t) != here.get(t)]


def read_explained(suite: str, variant: str) -> dict[str, str]:
    """Why a test may differ, by test, or by function for all its parameters."""
    table = tomllib.loads((HERE / "explained.toml").read_text())["explained"]
    return {
        row["test"]: row["why"]
        for row in table
        if row["suite"] == suite and variant in row["variants"]
    }


def compare(suite: Suite, variants: Iterable[str], workers: int, logs: Path) -> int:
    """Run, compare and print; how many differences nothing explains."""
    console = make_console()
    title = f"{suite.name}: {len(suite.tests)} files or tests"
    counted = ("passed", "failed", "skipped", "differ", "explained")
    table = make_table(console, title, "Variant", *counted)
    unexplained, lines, stock = 0, [], {}
    for variant in variants:
        name = f"{suite.name}-{variant}"
        found = run(suite, variant, suite.tests, workers, logs / f"{name}.log")
        stock = stock or found
        differ = differing(stock, found)
        if differ and len(differ) <= MOST_AGAIN:
            ids = [test for test in differ if "::" in test] or differ
            stock_again, again = (
                run(suite, v, ids, 0, logs / f"{name}-again-{v}.log")
                for v in ("stock", variant)
            )
            settled = set(differ) - set(differing(stock_again, again))
            lines += [f"{variant}: {t} differed, and does not alone" for t in settled]
            differ = [test for test in differ if test not in settled]
        explained = read_explained(suite.name, variant)
        why = {
            t: explained.get(t) or explained.get(t.partition("[")[0]) for t in differ
        }
        for test in differ:
            lines.append(
                f"{variant}: {test} {found.get(test)}, in stock {stock.get(test)}: "
                f"{why[test] or 'nothing explains it'}"
            )
        counts = Counter(found.values())
        known = sum(map(bool, why.values()))
        unexplained += len(differ) - known
        row = (counts["passed"], counts["failure"] + counts["error"], counts["skipped"])
        table.add_row(variant, *map(str, (*row, len(differ), known)))
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return unexplained


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument("--gpu", action="store_true", help="with the GPU that is here")
    parser.add_argument(
        "--fa4", type=Path, help="a checkout of flash-attention, for its tests of masks"
    )
    parser.add_argument(
        "--variants", default="", help="default: all; stock comes first"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest")
    parser.add_argument("--logs", type=Path, help="folder to keep logs and reports in")
    args = parser.parse_args()
    source = os.environ.get("VLLM_SOURCE")
    if args.fa4 is not None and not args.gpu:
        parser.error("--fa4 needs --gpu: FA4's tests ask for the GPU when imported")
    if source is None and args.fa4 is None:
        parser.error("VLLM_SOURCE must name vLLM's source, or --fa4 flash-attention's")
    if not args.gpu:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    variants = args.variants.split(",") if args.variants else list(VARIANTS)
    if variants[0] != "stock" or not set(variants) <= set(VARIANTS):
        parser.error(f"--variants must begin with stock and be of {list(VARIANTS)}")
    suites = []
    if source is not None:
        tests = importers_of_replaced_modules(Path(source))
        suites.append(Suite("vllm", Path(source), tests))
    if args.fa4 is not None:
        tests = [
            str(p.relative_to(args.fa4)) for p in sorted(args.fa4.glob(MASK_TESTS))
        ]
        suites.append(Suite("fa4", args.fa4, tests))
    try:
        suites = with_named_tests(suites, args.tests)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        counts = [compare(suite, variants, args.workers, logs) for suite in suites]
    sys.exit(bool(sum(counts)))


if __name__ == "__main__":
    main()

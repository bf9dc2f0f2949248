# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tries the changes of mutants.toml, each in a copy of the tree: its test has to fail.

``make mutants`` runs this; ``make mutants ARGS="NAME ..."`` tries those changes alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One change: in ``file``, ``old`` becomes ``new``, and ``test`` fails."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, tree: Path) -> str:
        """The changed file's text.

        Raises:
            ValueError: if the file has not exactly one place to change.
        """
        text = (tree / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} must have {self.old!r} once, and has it "
                f"{text.count(self.old)} times"
            )
        changed = text.replace(self.old, self.new)
        compile(changed, self.file, "exec")
        return changed


def read_mutants() -> list[Mutant]:
    """The table, with the short names of files and tests spelled out."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

    def spelled_out(name: str, file: str, test: str, **change: str) -> Mutant:
        short, _, function = test.partition("::")
        test = f"{table['tests'][short]}::{function}"
        return Mutant(name, table["files"][file], test=test, **change)

    return [spelled_out(name, **row) for name, row in table["mutants"].items()]


def copy_tree(target: Path) -> None:
    """Copy what git knows of the checkout, and what it does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def run_tests(tree: Path, tests: list[str], expected: pytest.ExitCode) -> bool:
    """Whether pytest ends as expected; says what it said if not."""
    environment = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    # Also what `make test` leaves to targets of its own.
    command += ["-m", "not (extra or grid)", *tests]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode != expected:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return done.returncode == expected


def main(names: list[str]) -> int:
    """Try the changes of these names, or all; 1 if a test did not do its part."""
    mutants = [m for m in read_mutants() if not names or m.name in names]
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        sys.exit(f"no such change: {', '.join(sorted(unknown))}")
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        tests = sorted({mutant.test for mutant in mutants})
        print(f"{len(tests)} tests of the tree as it is", flush=True)
        if not run_tests(tree, tests, pytest.ExitCode.OK):
            sys.exit("a test fails without any change")
        for mutant in mutants:
            path = tree / mutant.file
            before = path.read_text()
            path.write_text(mutant.apply(tree))
            noticed = run_tests(tree, [mutant.test], pytest.ExitCode.TESTS_FAILED)
            path.write_text(before)
            print("noticed " if noticed else "SURVIVED", mutant.name, flush=True)
            survivors += [] if noticed else [mutant.name]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} changes were noticed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

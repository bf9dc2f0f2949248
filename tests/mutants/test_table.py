# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The table of changes is up to date; ``make mutants`` tries them."""

import re
from pathlib import Path

import pytest

from tests.mutants.mutants import ROOT, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_place_and_the_test_are_there(mutant):
    assert mutant.apply(ROOT) != (ROOT / mutant.file).read_text()
    path, _, function = mutant.test.partition("::")
    assert re.search(rf"^def {function}\(", Path(ROOT / path).read_text(), re.M)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""docs/results has the records of the kernels as they compile now."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_sparse_mla.codegen import Variant

pytestmark = [pytest.mark.codegen, pytest.mark.timeout(3600)]

PAGE = Path(__file__).resolve().parents[2] / "docs/results/codegen-sm100.jsonl"
FIELDS = ("versions", "instructions", "loop_opcodes", "registers", "local_bytes")


def test_committed_records_are_those_of_these_kernels(compiled):
    rows = [json.loads(line) for line in PAGE.read_text().splitlines()]
    found = {Variant(**row["variant"]): row for row in rows}
    committed = {replace(variant, arch=None): row for variant, row in found.items()}
    common = committed.keys() & compiled.keys()
    assert len(common) > 10
    for variant in common:
        record = compiled[variant].to_dict()
        for name in FIELDS:
            assert record[name] == committed[variant][name], (
                f"{variant.label}: {name}; run python3 benchmarks/compiled_kernels.py"
            )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tables of prefill lengths, and where two ways take the same time."""

import pytest
from prefill_batches import parse_batch
from thresholds import (
    MASKED,
    RATIO,
    STOCK_MASKED,
    crossovers,
    table_admits,
)

BACKEND = "FLASHMLA_SPARSE"


def make_rows(ratios, ranks=8, backend=BACKEND):
    """Rows as a CSV has them, for ratios by (queries, context)."""
    rows = []
    for (queries, context), ratio in ratios.items():
        case = {"dims": "192/128", "ranks": str(ranks)}
        case |= {"queries": str(queries), "context": str(context)}
        rows.append(case | {"way": MASKED, RATIO: "1.000"})
        rows.append(case | {"way": STOCK_MASKED, RATIO: "1.300"})
        rows.append(case | {"way": backend, RATIO: str(ratio)})
    return rows


def pure(**ratios):
    return {(int(name[1:]), 0): ratio for name, ratio in ratios.items()}


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        ("q4096", True),
        ("q4097", False),
        ("q1024s8192", True),
        ("q1023s8192", False),
        ("q1024s8193", False),
        # The longest query and the longest sequence decide, whoever they belong to.
        ("q1024,30q16s8192", True),
        ("q1024,q16s8193", False),
    ],
)
def test_table_is_asked_as_vllm_asks(text, admitted):
    table = {(192, 128): {BACKEND: {8: (((4096, 0),), ((8192, 1024),))}}}
    batch = parse_batch(text)
    assert table_admits(table, "192/128", BACKEND, 8, batch) == admitted
    assert not table_admits(table, "192/128", BACKEND, 4, batch)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (pure(n4096=2.0, n8192=1.5), "above 8192"),
        (pure(n4096=0.9, n8192=0.5), "below 4096"),
        (pure(n4096=2.0, n16384=0.5), "8192"),
    ],
)
def test_crossover(ratios, expected):
    (row,) = crossovers(make_rows(ratios))
    assert row["tokens"] == expected

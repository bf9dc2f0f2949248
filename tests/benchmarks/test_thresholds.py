# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Thresholds derived from made-up layer steps."""

import ast

import pytest
from prefill_batches import parse_batch
from thresholds import (
    MASKED,
    RATIO,
    STOCK_MASKED,
    crossovers,
    derive_thresholds,
    table_admits,
    to_source,
)

DIMS = (192, 128)
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
    ("ratios", "expected"),
    [
        (pure(n4096=3.0, n8192=2.0, n16384=1.05), ((16384, 0),)),
        (pure(n4096=3.0, n8192=1.049, n16384=2.0), ((4096, 0),)),
        (pure(n4096=0.9, n8192=2.0), ()),
        (pure(n2048=0.5, n4096=2.0), ((4096, 0),)),
        (pure(n2048=2.0), ()),
    ],
    ids=["all won", "stops at the first lost", "first lost", "top-k", "only top-k"],
)
def test_pure_prefill(ratios, expected):
    assert derive_thresholds(make_rows(ratios))[DIMS][BACKEND][8] == (expected, ())


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (
            {(512, 7680): 0.9, (1024, 7168): 1.2, (4096, 4096): 2.0},
            ((8192, 1024),),
        ),
        # A longer query that lost rules out the shorter ones that won.
        ({(512, 7680): 1.5, (1024, 7168): 1.0, (4096, 4096): 2.0}, ((8192, 4096),)),
        # Past a length at which nothing won, nothing is admitted.
        (
            {(2048, 2048): 2.0, (4096, 4096): 1.0, (8192, 8192): 2.0},
            ((4096, 2048),),
        ),
    ],
    ids=["shortest", "always from there on", "stops at the first lost"],
)
def test_with_context(ratios, expected):
    assert derive_thresholds(make_rows(ratios))[DIMS][BACKEND][8] == ((), expected)


def test_backends_and_sizes_are_apart():
    ratios = pure(n4096=2.0)
    rows = make_rows(ratios, ranks=1) + make_rows(ratios, ranks=2, backend="OTHER")
    table = derive_thresholds(rows)
    assert {b: list(sizes) for b, sizes in table[DIMS].items()} == {
        BACKEND: [1],
        "OTHER": [2],
    }


def test_printed_form_holds_the_table():
    table = derive_thresholds(make_rows(pure(n4096=2.0) | {(1024, 7168): 1.2}))
    assert ast.literal_eval(to_source(table)) == table


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
    table = derive_thresholds(make_rows(pure(n4096=2.0) | {(1024, 7168): 1.2}))
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

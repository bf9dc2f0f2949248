# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The estimate for a whole DeepSeek-V3.2, against sums done by hand."""

import pytest
from kernel_groups import GROUPS, OTHER
from result_sections import ALL_KERNELS, FIRST_TOKEN
from whole_model import (
    HIGH,
    LOW,
    all_reduce_ms,
    measured_ms,
    parameters,
    products_ms,
    whole_model,
)


def rows(**attention: float) -> list[dict]:
    """A profile at 8192 tokens: attention by variant; 1 ms of every other group."""
    found = []
    for variant, ms in attention.items():
        times = {group: 1.0 for group in (*GROUPS, OTHER)} | {"attention": ms}
        times |= {FIRST_TOKEN: 99.0, ALL_KERNELS: 99.0}
        place = {"prompt tokens": "8192", "variant": variant.replace("_", "-")}
        for group, time in times.items():
            row = {"group": group, "kernel": "", "median ms": str(time)}
            found += [row | place | {"model": m} for m in ("dsv32-16h", "dsv32-128h")]
            found.append(found[-2] | {"kernel": "one of the group's"})
    return found


def test_parameters_of_a_token_are_those_deepseek_states():
    # 37 billion active ones, here with the indexer's and without those of 129280
    # token ids, whose output projection only the last token meets.
    vocabulary, indexer = 129280 * 7168, 61 * (1536 * 64 * 128 + 7168 * (64 + 128))
    assert sum(parameters()) - indexer + vocabulary == pytest.approx(37e9, rel=0.02)


def test_a_layer_counts_61_times_and_a_request_once():
    found = measured_ms(rows(stock=12.0, opt_in=2.0))
    others = len(GROUPS) - 2  # beside attention and projections
    assert found[8192, "stock"] == pytest.approx(61 / 4 * (12 + others) + 1)
    assert found[8192, "opt-in"] == pytest.approx(61 / 4 * (2 + others) + 1)


def test_the_gain_is_a_range_from_low_to_high():
    header, _, line = whole_model(rows(stock=12.0, opt_in=2.0)).splitlines()
    names, cells = ([c.strip() for c in s.split("|")[1:-1]] for s in (header, line))
    cell = dict(zip(names, cells, strict=True))
    assert cell["prompt tokens"] == "8192"
    low, high = map(float, cell["times faster"].split(" to "))
    measured = measured_ms(rows(stock=12.0, opt_in=2.0))
    for assumed, ratio in ((LOW, low), (HIGH, high)):
        rest = products_ms(8192, assumed) + all_reduce_ms(8192, assumed)
        stock, ours = (measured[8192, v] + rest for v in ("stock", "opt-in"))
        assert ratio == pytest.approx(stock / ours, abs=0.006)
    assert 1 < low < high

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Coefficients are found again from steps that were made with them."""

import numpy as np
import pytest
from fit_estimate import (
    errors,
    estimate,
    estimated_us,
    fit,
    least_squares,
    read_measured,
    regrets,
)
from prefill_batches import fit_cases
from thresholds import MASKED

BACKEND = "FLASHMLA_SPARSE"
MASKED_US = (20.0, 1e-3, 1.8, 20.0, 6e-4, 8e-4, 2.0, 7e-4)
SPARSE_US = (30.0, 1.5e-3, 0.06, 5e-5, 1.8e-4, 7e-6, 0.0)


def make_rows():
    """Rows as a CSV has them, of the cases that a real run measures."""
    for model, heads, topk, batch in fit_cases():
        if model != "deepseek":
            continue
        case = {"dims": "192/128", "ranks": str(128 // heads), "heads": str(heads)}
        case |= {"top-k": str(topk), "kv cache": "auto", "batch": str(batch)}
        chunks = int(any(batch.context_lens))
        case |= {"chunks": str(chunks), "multiprocessors": "132", "max splits": "32"}
        terms = estimate.prefill_terms(
            batch.query_lens, batch.context_lens, chunks, heads, topk, 132, 32
        )
        for way, us, values in zip((MASKED, BACKEND), (MASKED_US, SPARSE_US), terms):
            yield case | {"way": way, "median us": str(float(np.dot(us, values)))}


@pytest.fixture(scope="module")
def steps():
    return read_measured(make_rows())


@pytest.fixture(scope="module")
def costs(steps):
    return fit("a GPU", [step for step in steps if not step.is_kept])


def test_coefficients_are_found_again(costs):
    assert (costs["gpu"], costs["multiprocessors"]) == ("a GPU", 132)
    ways = costs["microseconds"]["192/128"]
    for way, expected in ((MASKED, MASKED_US), (BACKEND, SPARSE_US)):
        found = list(ways[way]["auto"].values())
        assert found == pytest.approx(expected, rel=0.02, abs=1e-10)


def test_no_coefficient_is_negative():
    terms = np.array([[1.0, 2.0, 0.0], [1.0, 1.0, 0.0], [1.0, 3.0, 0.0]])
    target = 1.0 - 0.1 * terms[:, 1]  # of which the second would be negative
    found = least_squares(terms / target[:, None])
    assert found.min() >= 0 and found[1] == found[2] == 0


def test_kept_steps_share_no_batch_with_the_others(steps):
    kept = {str(step.batch) for step in steps if step.is_kept}
    others = {str(step.batch) for step in steps if not step.is_kept}
    assert kept and not kept & others


def test_true_coefficients_have_neither_error_nor_regret(costs, steps):
    assert all(abs(row["worst error %"]) < 1 for row in errors(costs, steps))
    by_rule = {row["rule"]: row for row in regrets(costs, {}, steps)}
    assert by_rule["estimate"]["regret %"] < 0.1
    never, always = by_rule["always sparse MQA"], by_rule["always masked MHA"]
    assert min(never["regret %"], always["regret %"]) > 5
    # A table without rows admits nothing.
    assert by_rule["table"]["regret %"] == never["regret %"]


def test_the_worst_step_is_named(costs, steps):
    by_rule = {row["rule"]: row for row in regrets(costs, {}, steps)}
    worst = by_rule["always masked MHA"]
    ratios = {
        str(step.batch): np.divide(*estimated_us(costs, step, BACKEND))
        for step in steps
    }
    assert worst["worst step / better way"] == pytest.approx(max(ratios.values()), 0.01)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The comparison that judges served answers."""

import math

import pytest
from serving.client import Completion, make_prompt
from serving.compare import Difference, between, difference, spread


def _answer(tokens, logprobs, gaps=None) -> Completion:
    return Completion(
        status=200,
        token_ids=list(tokens),
        logprobs=list(logprobs),
        gaps=list(gaps or [1.0] * len(tokens)),
        prompt_logprobs=[-1.0, -2.0],
    )


def test_equal_answers_are_identical():
    answer = _answer([3, 4], [-0.5, -0.25])
    assert difference(answer, answer).identical
    assert spread([answer] * 3).identical


def test_difference_stops_where_tokens_part():
    first = _answer([3, 4, 5], [-0.5, -0.25, -9.0], gaps=[1.0, 0.125, 1.0])
    second = _answer([3, 7, 5], [-0.75, -0.25, -1.0])
    found = difference(first, second)
    assert found == Difference(0.25, 0.25 / 3, 1, 0.125)
    assert not found.identical


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        (Difference(0.02, 0.001), True),
        (Difference(0.04, 0.001), False),
        (Difference(0.02, 0.02), False),
        (Difference(0.02, 0.001, 3, 0.05), True),
        (Difference(0.02, 0.001, 3, 0.5), False),
        (Difference(math.inf, math.inf), False),
    ],
    ids=["inside", "largest", "mean", "tie", "no-tie", "not-finite"],
)
def test_budget(found, fits):
    assert found.within(Difference(0.03, 0.01)) is fits


def test_nan_never_fits_a_budget():
    found = difference(_answer([3], [-1.0]), _answer([3], [math.nan]))
    assert not found.within(Difference(100.0, 100.0))


def test_between_takes_the_worst_pair():
    first = [_answer([3], [-1.0]), _answer([3], [-1.5])]
    assert between(first, [_answer([3], [-2.0])]).largest == 1.0


def test_failed_request_cannot_be_compared():
    failed = Completion(status=500, error="dead")
    with pytest.raises(ValueError, match="second must be a success, got 'dead'"):
        difference(_answer([3], [-1.0]), failed)


def test_prompts_are_reproducible_and_leave_special_tokens_out():
    assert make_prompt(500, 7) == make_prompt(500, 7) != make_prompt(500, 8)
    assert set(range(2, 1024)).issuperset(make_prompt(5000, 1))

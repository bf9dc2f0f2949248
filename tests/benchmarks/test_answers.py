# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The check that comes before times of servers, with made-up answers."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from serving import answers
from serving.client import Completion, make_prompt
from serving.scenario import (
    STOCK_NOISE,
    control_difference,
    control_prompt,
)

LENGTH = 400
SERVERS = {name: SimpleNamespace(url=name) for name in ("stock", "patched", "opt-in")}


def complaints(
    monkeypatch, errors=(), noise=0.0, control=1.0, quantized=False
) -> list[str]:
    """What the check finds, given errors by server and the spread of each one's runs.

    ``control`` is how far a token's log-probability moves with the replaced keys.
    """
    original = make_prompt(LENGTH, seed=LENGTH)
    runs = itertools.count()

    async def complete(session, url, prompt, max_tokens, **kwargs):
        moved = dict(errors).get(url, 0.0) + noise * (next(runs) % 2)
        moved += control * (prompt != original)
        return Completion(status=200, prompt_logprobs=[-5.0 + moved] * (LENGTH - 1))

    monkeypatch.setattr(answers, "complete", complete)
    unquantized = SimpleNamespace(url="unquantized") if quantized else None
    found, columns = asyncio.run(
        answers.check_answers(None, SERVERS, LENGTH, unquantized)
    )
    assert list(columns) == list(SERVERS)
    return found


def test_servers_that_agree_are_timed(monkeypatch):
    assert complaints(monkeypatch) == []
    assert complaints(monkeypatch, {"opt-in": 0.9 * STOCK_NOISE}) == []


@pytest.mark.parametrize("error", [1.1 * STOCK_NOISE, float("nan")])
def test_a_server_that_answers_otherwise_is_named(monkeypatch, error):
    (complaint,) = complaints(monkeypatch, {"opt-in": error})
    assert "400 tokens: opt-in answers otherwise than stock" in complaint


def test_twice_the_spread_of_the_baseline_is_allowed(monkeypatch):
    assert complaints(monkeypatch, {"opt-in": 0.09}, noise=0.1) == []
    (complaint,) = complaints(monkeypatch, {"opt-in": 0.11}, noise=0.1)
    assert "by 0.21000 on average where 0.20000 is allowed" in complaint


def test_twice_what_a_quantized_cache_changes_in_stock_is_allowed(monkeypatch):
    errors = {"unquantized": 0.1, "opt-in": 0.19}
    assert complaints(monkeypatch, errors, quantized=True) == []
    errors["opt-in"] = 0.21
    (complaint,) = complaints(monkeypatch, errors, quantized=True)
    assert "by 0.21000 on average where 0.20000 is allowed" in complaint


def test_a_model_that_does_not_feel_its_keys_is_refused(monkeypatch):
    (complaint,) = complaints(monkeypatch, control=0.05)
    assert "other keys change the answer by 0.05000" in complaint


@pytest.mark.parametrize("length", [4, 5, 6, 7, 400, 4001])
def test_control_leaves_the_second_half_alone(length):
    prompt = make_prompt(length, seed=0)
    control = control_prompt(prompt)
    assert len(control) == length
    changed = [i for i in range(length) if prompt[i] != control[i]]
    quarter = length // 4
    assert quarter <= changed[0] <= changed[-1] < 2 * quarter
    # The log-probabilities of the second token and of those after it.
    answers = [
        Completion(status=200, prompt_logprobs=[-float(token) for token in tokens[1:]])
        for tokens in (prompt, control)
    ]
    assert control_difference(*answers).identical

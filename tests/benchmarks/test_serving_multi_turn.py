# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The multi-turn benchmark's requests and numbers, with made-up servers."""

import asyncio
import itertools
import math
import os
import random
import signal
from types import SimpleNamespace

import benchmark_serving_multi_turn as multi_turn
import pytest
import serving.rounds
from result_sections import multi_turn as section
from serving.client import Completion
from serving.rounds import compared_rows

TURN_TOKENS = 16
NUM_PROMPTS = 12


class Served:
    """Answers as `stream` does, and notes what was asked.

    Attributes:
        asked: prompts by address, in the order of their arrival.
        at_a_time: most requests that were unanswered together.
    """

    def __init__(self, delay=lambda url: 0.02, refused=(), forgets=False):
        self.asked: dict[str, list[str]] = {}
        self.at_a_time = self.running = 0
        self._delay, self._refused, self._forgets = delay, set(refused), forgets
        self._random = random.Random(0)

    async def stream(self, session, url, prompt, max_tokens):
        asked = self.asked.setdefault(url, [])
        asked.append(prompt)
        number = len(asked)
        self.running += 1
        self.at_a_time = max(self.at_a_time, self.running)
        # Answers come in another order than the requests.
        for _ in range(self._random.randrange(5)):
            await asyncio.sleep(0)
        self.running -= 1
        if number in self._refused:
            return Completion(status=500, error="no")
        return Completion(
            status=200,
            cached_tokens=0 if self._forgets else len(prompt) - TURN_TOKENS,
            ttft=self._delay(url) + 1e-3 * (len(prompt) == multi_turn.PROMPT_TOKENS),
        )


@pytest.fixture
def serve(monkeypatch):
    """Makes a `Served` and measures variants of it: it, and the rows."""

    def run(variants=("stock", "opt-in"), rounds=2, time_limit=math.inf, **kwargs):
        served = Served(**kwargs)
        monkeypatch.setattr(multi_turn, "stream", served.stream)
        servers = {
            name: SimpleNamespace(
                url=name, folder=name, jit_kernels=lambda: ["a kernel"]
            )
            for name in variants
        }
        memory = {"allocated": 3}
        monkeypatch.setattr(serving.rounds, "gpu_mib_at", lambda *args: memory)
        records = {name: 0 for name in variants}
        monkeypatch.setattr(
            serving.rounds, "read_records", lambda name: range(records[name])
        )
        found = asyncio.run(
            multi_turn.measure(servers, [TURN_TOKENS], rounds, NUM_PROMPTS, time_limit)
        )
        return served, compared_rows(found, "turn tokens", multi_turn.COUNTS)

    return run


def value(rows, measure, variant="opt-in", column="value"):
    (row,) = (r for r in rows if (r["measure"], r["variant"]) == (measure, variant))
    return row[column]


def test_every_server_gets_the_same_requests(serve):
    served, rows = serve(("stock", "patched", "opt-in"))
    lengths = {url: sorted(map(len, asked)) for url, asked in served.asked.items()}
    assert lengths["stock"] == lengths["patched"] == lengths["opt-in"]
    new = {
        url: [p for p in asked if len(p) == multi_turn.PROMPT_TOKENS]
        for url, asked in served.asked.items()
    }
    assert new["stock"] == new["patched"] == new["opt-in"]
    # Two rounds, and the warm-up's quarter; no prompt twice, for it would be cached.
    assert len(new["stock"]) == 2 * NUM_PROMPTS + NUM_PROMPTS // 4
    assert len(set(new["stock"])) == len(new["stock"])


def test_a_turn_goes_on_from_the_one_before(serve):
    served, _ = serve(("stock",), rounds=6)
    history: dict[str, str] = {}
    restarts = 0
    filled, asked = served.asked["stock"][:30], served.asked["stock"][30:]
    turns = [prompt for prompt in asked if len(prompt) != multi_turn.PROMPT_TOKENS]
    assert [len(prompt) for prompt in filled] == [multi_turn.BASE_TOKENS] * 30
    for prompt in turns:
        user = prompt[: multi_turn.BASE_TOKENS]
        assert user in filled
        before = history.get(user, user)
        if prompt.startswith(before):
            # What was answered lies between what was asked.
            answer = len(prompt) - len(before) - TURN_TOKENS
            assert answer == (multi_turn.ANSWER_TOKENS if user in history else 0)
        else:
            restarts += 1
            assert len(prompt) == multi_turn.BASE_TOKENS + TURN_TOKENS
            assert len(before) >= multi_turn.BASE_TOKENS + multi_turn.GROWTH_TOKENS - 24
        history[user] = prompt
    assert len(history) == 30
    expected = multi_turn.TURNS_A_PROMPT * (6 * NUM_PROMPTS + NUM_PROMPTS // 4)
    assert len(turns) == expected
    longest = max(map(len, turns))
    assert longest <= multi_turn.BASE_TOKENS + multi_turn.GROWTH_TOKENS + TURN_TOKENS
    assert not restarts or restarts < 30


def interrupted_at(number):
    """A delay that is longer from round 3 on, and an interrupt at one request."""
    warm_up, a_round = 2 * 9 * math.ceil(NUM_PROMPTS / 4), 2 * 9 * NUM_PROMPTS
    third = 2 * multi_turn.CONVERSATIONS + warm_up + 2 * a_round
    requests = itertools.count()

    def delay(url):
        request = next(requests)
        if request == third + number:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.02 if request < third else 1.0

    return delay


@pytest.fixture
def interruptible():
    """Heeds SIGINT also where a shell has started this in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_whole_rounds(serve, capsys):
    # While the second server is in its third round.
    _, rows = serve(rounds=9, delay=interrupted_at(9 * NUM_PROMPTS + 20))
    for variant in ("stock", "opt-in"):
        assert value(rows, "turn: TTFT p99 ms", variant) == pytest.approx(20)
    assert "interrupted in round 3" in capsys.readouterr().err


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_first_round_ends_all(serve):
    with pytest.raises(KeyboardInterrupt):
        serve(delay=interrupted_at(-2 * 9 * NUM_PROMPTS - 20))


def test_the_time_limit_leaves_one_round(serve, capsys):
    served, rows = serve(rounds=3, time_limit=0)
    turns = NUM_PROMPTS * multi_turn.TURNS_A_PROMPT
    warm_up = math.ceil(NUM_PROMPTS / 4) * multi_turn.TURNS_A_PROMPT
    for asked in served.asked.values():
        longer = [p for p in asked if len(p) > multi_turn.BASE_TOKENS]
        assert len(longer) == warm_up + turns
    assert value(rows, "failed") == 0
    assert "the time limit ended the run in round 2" in capsys.readouterr().err


def test_so_many_are_sent_at_a_time(serve):
    served, _ = serve(("stock",))
    # A few of them wait for the turn before theirs.
    assert multi_turn.AT_A_TIME - 5 < served.at_a_time <= multi_turn.AT_A_TIME


def test_times_are_counted_and_compared(serve):
    _, rows = serve(delay={"stock": 0.02, "opt-in": 0.021}.get)
    assert value(rows, "turn: TTFT p50 ms") == pytest.approx(21.0)
    assert value(rows, "prompt: TTFT p99 ms") == pytest.approx(22.0)
    for column in ("/ stock", "least", "greatest"):
        assert value(rows, "turn: TTFT p99 ms", column=column) == pytest.approx(1.05)
    assert value(rows, "failed") == value(rows, "cold") == value(rows, "compiled") == 0
    assert value(rows, "tensors MiB") == 3
    text = section(rows)
    assert "21.0 (1.050; 1.050 to 1.050)" in text
    assert "turn: TTFT p50 ms, turns of 16 (1.050)" in text


@pytest.mark.parametrize(
    ("measure", "ratio", "is_slower"),
    [
        ("turn: TTFT p99 ms", 1.029, False),
        ("turn: TTFT p99 ms", 1.031, True),
        ("turn: TTFT p99 ms", 0.5, False),
        ("turn: TTFT p99 ms", float("nan"), True),
        ("requests/s", 0.971, False),
        ("requests/s", 0.969, True),
        ("requests/s", 1.5, False),
    ],
)
def test_the_verdict(measure, ratio, is_slower):
    row = {"turn tokens": 16, "measure": measure, "value": 1.0, "/ stock": 1.0}
    row |= {"least": 1.0, "greatest": 1.0}
    rows = [row | {"variant": "stock"}, row | {"variant": "opt-in", "/ stock": ratio}]
    text = section(rows)
    assert ("`opt-in` nowhere." in text) is not is_slower
    assert (f"{measure}, turns of 16 ({ratio:.3f})" in text) is is_slower


def test_failures_and_lost_histories_are_counted(serve):
    _, rows = serve(refused=(31 + 40, 31 + 60))
    assert value(rows, "failed") == 2
    assert value(rows, "failed", "stock") == 2
    _, rows = serve(forgets=True)
    assert value(rows, "cold") == 2 * NUM_PROMPTS * multi_turn.TURNS_A_PROMPT

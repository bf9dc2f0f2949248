# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tensor parallelism over two GPUs gives the answers of one GPU."""

import asyncio

import pytest
from serving import scenario
from serving.client import complete, make_prompt, open_session
from serving.compare import between
from serving.probe import read_records
from serving.scenario import PROMPT_LENGTHS
from serving.server import NO_COMPILE

pytestmark = pytest.mark.gpu

ENDS = ("stock", "opt-in")


@pytest.fixture(scope="module")
def tp_servers(sm90_gpus, running):
    """Servers by variant and tensor-parallel size."""
    if sm90_gpus < 2:
        pytest.skip(f"needs two SM90 GPUs of one host, found {sm90_gpus}")
    arguments = (*NO_COMPILE, "--tensor-parallel-size", "2")
    with (
        running("tp1", ENDS) as one,
        running("tp2", ENDS, several_gpus=True, extra_args=arguments) as two,
    ):
        yield {
            f"{variant}-{size}": started[variant]
            for size, started in (("tp1", one), ("tp2", two))
            for variant in ENDS
        }


@pytest.fixture(scope="module")
def answers(tp_servers):
    return scenario.ask(tp_servers)


@pytest.mark.parametrize(
    "index", range(len(PROMPT_LENGTHS)), ids=map(str, PROMPT_LENGTHS)
)
def test_two_gpus_answer_as_one(answers, index):
    # What stock changes between one and two GPUs is rounding, not an error.
    budget = scenario.noise_budget(
        answers["stock-tp1"].by_prompt(), answers["stock-tp2"].by_prompt()
    )
    one, two = (answers[n].by_prompt()[index] for n in ("opt-in-tp1", "opt-in-tp2"))
    assert between(one, two).within(budget), (between(one, two), budget)
    stock = answers["stock-tp2"].by_prompt()[index]
    assert between(stock, two).within(budget), (between(stock, two), budget)


def test_dispatch_sees_all_heads_of_the_model(answers, tp_servers):
    """64 heads a rank: admitted only because the model has 128 in total."""
    one, two = (
        read_records(tp_servers[name].folder) for name in ("opt-in-tp1", "opt-in-tp2")
    )
    assert {c["num_heads"] for c in two} == {64}
    assert len({c["pid"] for c in two}) == 2
    assert {c["num_heads"] for c in one} == {128}


def test_each_worker_says_that_it_is_active(tp_servers):
    server = tp_servers["opt-in-tp2"]
    processes = [server.process.pid, *(p.pid for p in server.engine_processes())]
    assert len(processes) == 4
    assert sorted(server.active_pids()) == sorted(processes)


def test_killed_worker_ends_as_in_stock(tp_servers):
    """The last test of these servers: it ends two of them."""

    async def kill(name: str):
        server = tp_servers[name]
        server.engine_processes()[0].kill()
        exit_status = await asyncio.to_thread(server.process.wait, 90)
        async with open_session() as session:
            refused = await complete(session, server.url, make_prompt(9, seed=1), 1)
        return exit_status, refused.ok

    async def kill_both():
        return await asyncio.gather(kill("stock-tp2"), kill("opt-in-tp2"))

    stock, opt_in = asyncio.run(kill_both())
    assert stock == opt_in
    assert not stock[1]

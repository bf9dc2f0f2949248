# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Clients and workers that go away: the patch set behaves as stock vLLM does."""

import asyncio
import time

import pytest
from serving import scenario
from serving.client import (
    complete,
    make_prompt,
    open_session,
    running_requests,
    stream,
)
from serving.compare import Difference, difference
from serving.server import VARIANTS, Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("servers", ["auto"], indirect=True),
]

LONG_PROMPT = make_prompt(7000, seed=3)
# Thrice what stock differed from itself by at 300 tokens on an H200 (0.02, 0.003).
STOCK_NOISE = Difference(largest=0.06, mean=0.01)
MAX_FAILURE_S = 30.0
MAX_EXIT_S = 60.0


async def _is_idle_within(session, url: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if await running_requests(session, url) == 0:
            return True
        await asyncio.sleep(0.1)
    return False


async def _answers_after(fault, server: Server):
    """Run ``fault``; then the server is idle and still answers as before."""
    prompt, sparse_prompt = make_prompt(300, seed=4), make_prompt(700, seed=4)
    async with open_session() as session:
        before = await complete(session, server.url, prompt, 4, salt="before")
        await fault(session, server.url)
        assert await _is_idle_within(session, server.url, MAX_FAILURE_S)
        after = await complete(session, server.url, prompt, 4, salt="after")
        sparse = await complete(session, server.url, sparse_prompt, 4, salt="after")
    assert server.is_healthy()
    assert difference(before, after).within(STOCK_NOISE)
    assert sparse.ok


async def _disconnect_in_prefill(session, url: str) -> None:
    # Prompts take several steps; the delays hit different ones.
    for delay in (0.01, 0.03, 0.05, 0.1):
        requests = [
            asyncio.create_task(complete(session, url, LONG_PROMPT, 4, salt=f"{i}"))
            for i in range(4)
        ]
        await asyncio.sleep(delay)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def _abort_in_decode(session, url: str) -> None:
    requests = (
        stream(session, url, LONG_PROMPT[: 100 + i], 2000, stop_after=3)
        for i in range(4)
    )
    for aborted in await asyncio.gather(*requests):
        assert 3 <= len(aborted.token_ids) < 2000


async def _oversized_prompt(session, url: str) -> None:
    prompt = make_prompt(scenario.MAX_MODEL_LEN + 1, seed=5)
    refused = await complete(session, url, prompt, 1)
    assert refused.status == 400
    assert str(scenario.MAX_MODEL_LEN) in refused.error


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "fault",
    [_disconnect_in_prefill, _abort_in_decode, _oversized_prompt],
    ids=["disconnect-in-prefill", "abort-in-decode", "oversized-prompt"],
)
def test_server_survives(servers, fault, variant):
    asyncio.run(_answers_after(fault, servers[variant]))


async def _outcome_of_killed_worker(server: Server) -> dict:
    async with open_session() as session:
        request = asyncio.create_task(
            stream(session, server.url, LONG_PROMPT[:300], 5000)
        )
        while await running_requests(session, server.url) == 0:
            await asyncio.sleep(0.05)
        server.engine_processes()[0].kill()
        start = time.monotonic()
        failed = await asyncio.wait_for(request, MAX_FAILURE_S)
        exit_status = await asyncio.to_thread(server.process.wait, MAX_EXIT_S)
    return {
        "request failed": not failed.ok,
        "exit status": exit_status,
        "ended in time": time.monotonic() - start < MAX_EXIT_S,
        "log names it": "EngineDeadError" in server.log_text(),
    }


def test_killed_worker_ends_as_in_stock(servers):
    """The last test of these servers: it ends them."""

    async def kill_all():
        return await asyncio.gather(*map(_outcome_of_killed_worker, servers.values()))

    stock, patched, opt_in = asyncio.run(kill_all())
    assert stock["request failed"] and stock["ended in time"]
    assert stock == patched == opt_in

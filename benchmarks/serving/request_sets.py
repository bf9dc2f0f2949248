# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests for launches that the scenario's do not reach.

Each set ends with the negative control of its last prompt, as the scenario does.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from serving.client import (
    Completion,
    chat,
    complete,
    make_prompt,
    open_session,
    running_requests,
    stream,
)
from serving.scenario import GENERATED, Answers, control_prompt
from serving.server import Server

MANY = 256
MANY_LENGTH = 2415
DECODED = 8000  # tokens of a request that others are to run beside
RUNS = 2
BLOCK = 64
# Where prompts end, in tokens past a block of the prefix cache.
PAST_A_BLOCK = (31, 32, 33)
TEXT = "The quick brown fox jumps over the lazy dog, and so on. "


async def _ask_with_control(session, server: Server, answers: Answers) -> None:
    """Append a scored prompt, and its negative control."""
    prompt = make_prompt(MANY_LENGTH, seed=0)

    def score(prompt: list[int], salt: str):
        ask = (session, server.url, prompt, GENERATED)
        return complete(*ask, salt=salt, score_prompt=True)

    answers.alone.append([await score(prompt, f"scored {run}") for run in range(RUNS)])
    answers.control = await score(control_prompt(prompt), "control")


@contextlib.asynccontextmanager
async def _beside_a_decode(session, server: Server) -> AsyncIterator[None]:
    """Keep a request running: vLLM does not cut the prompt of one that is alone."""
    ask = (session, server.url, make_prompt(BLOCK, seed=MANY), DECODED)
    decode = asyncio.create_task(stream(*ask))
    try:
        while not (decode.done() or await running_requests(session, server.url)):
            await asyncio.sleep(0.05)
        yield
        if decode.done():
            raise RuntimeError(f"the decode came to its end: {decode.result().error}")
    finally:
        decode.cancel()


async def _after_warm_up(
    server: Server, round_of: Callable[[str], Awaitable[Answers]]
) -> Answers:
    """The second of two rounds, and what was compiled before it."""
    await round_of("warm-up")
    warm_jit = server.jit_kernels()
    answers = await round_of("asked")
    answers.warm_jit = warm_jit
    return answers


async def ask_many(server: Server) -> Answers:
    """256 prompts of 2415 tokens at once, twice, beside a decode."""
    prompts = [make_prompt(MANY_LENGTH, seed=index) for index in range(MANY)]
    async with open_session() as session:

        async def round_of(salt: str, count: int) -> list[Completion]:
            ask = (
                complete(session, server.url, prompt, GENERATED, salt=salt)
                for prompt in prompts[:count]
            )
            return await asyncio.gather(*ask)

        async with _beside_a_decode(session, server):
            await _ask_with_control(session, server, Answers())
            await round_of("warm-up", 64)
            answers = Answers(warm_jit=server.jit_kernels())
            rounds = [await round_of(f"round {run}", MANY) for run in range(RUNS)]
            answers.alone = [list(runs) for runs in zip(*rounds, strict=True)]
            await _ask_with_control(session, server, answers)
    return answers


async def ask_prompt_logprobs(server: Server) -> Answers:
    """Scored prompts, cold and where the cache has them; then longer ones that hit."""
    async with open_session() as session:

        async def round_of(salt: str) -> Answers:
            found = Answers()
            for past in PAST_A_BLOCK:
                prompt = make_prompt(25 * BLOCK + past, seed=past)
                longer = prompt + make_prompt(700, seed=past + 1)
                ask = (session, server.url)
                runs = (
                    complete(*ask, prompt, GENERATED, salt=salt, score_prompt=True)
                    for _ in range(RUNS)
                )
                found.alone.append([await run for run in runs])
                found.prefixed.append(
                    await complete(*ask, longer, GENERATED, salt=salt)
                )
            await _ask_with_control(session, server, found)
            return found

        return await _after_warm_up(server, round_of)


async def ask_text(server: Server) -> Answers:
    """Prompts of text, and chats: the server's tokenizer is between."""
    async with open_session() as session:

        async def round_of(salt: str) -> Answers:
            found = Answers()
            for count in (1, 20, 100):
                ask = (session, server.url, TEXT * count, GENERATED)
                runs = (complete(*ask, salt=f"{salt} {run}") for run in range(RUNS))
                found.alone.append([await run for run in runs])
                runs = (chat(*ask, salt=f"{salt} {run}") for run in range(RUNS))
                found.alone.append([await run for run in runs])
            await _ask_with_control(session, server, found)
            return found

        return await _after_warm_up(server, round_of)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The requests that stock and patched servers answer alike.

Prompts below and above the top-k, alone and in a crowd under a token budget that
cuts them at odd places, with a decode running, and with a shared prefix.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from serving.client import (
    Completion,
    complete,
    make_prompt,
    open_session,
    stream,
)
from serving.compare import Difference, difference, spread, worst
from serving.server import Server

# V3.2's 128 heads, so that masked MHA is eligible, and a top-k of 512.
MODEL = "tiny-128h"
# Odd, so that chunks start at keys that are no multiple of 32.
TOKEN_BUDGET = 1533
MAX_MODEL_LEN = 8192
# Short extends count as decodes; then dense MHA up to the top-k; then sparse. The
# longest two take two and three scheduler steps.
PROMPT_LENGTHS = (64, 300, 513, 700, 1533, 2900, 4001)
ALONE_REPEATS = 3
CROWD_REPEATS = 2
GENERATED = 8
PREFIX_LENGTH = 1100
SUFFIX_LENGTHS = (333, 517, 61)

# Stock runs of one prompt on an H200 were seen to differ by so much.
STOCK_NOISE = 0.03


@dataclass
class Answers:
    """What one server answered."""

    # Per prompt, the answers when nothing else ran.
    alone: list[list[Completion]] = field(default_factory=list)
    # Per prompt, the answers amid all prompts and a decode.
    crowded: list[list[Completion]] = field(default_factory=list)
    # Per suffix, the answer that took its prefix from the cache.
    prefixed: list[Completion] = field(default_factory=list)
    # Answer to the ``control_prompt`` of the longest prompt.
    control: Completion = field(default_factory=Completion)
    # Kernels compiled between start-up and ``alone``.
    warm_jit: list[str] = field(default_factory=list)

    def by_prompt(self) -> list[list[Completion]]:
        """The answers alone and, where there was one, in the crowd, by prompt."""
        crowded = self.crowded or [[]] * len(self.alone)
        return [a + b for a, b in zip(self.alone, crowded, strict=True)]

    def everything(self) -> list[Completion]:
        """All answers."""
        return [*sum(self.by_prompt(), []), *self.prefixed, self.control]


def control_prompt(prompt: list[int]) -> list[int]:
    """The prompt with its second quarter replaced, for a negative control."""
    quarter = len(prompt) // 4
    return [
        *prompt[:quarter],
        *make_prompt(quarter, seed=2),
        *prompt[2 * quarter :],
    ]


def control_difference(answer: Completion, control: Completion) -> Difference:
    """Difference over a prompt's second half, whose tokens the control shares."""
    half = len(answer.prompt_logprobs) // 2
    return difference(
        *(
            Completion(
                status=found.status, prompt_logprobs=found.prompt_logprobs[half:]
            )
            for found in (answer, control)
        )
    )


async def ask_server(
    server: Server, lengths: Sequence[int] = PROMPT_LENGTHS
) -> Answers:
    """Put the scenario to a server, with prompts of these lengths in tokens."""
    prompts = [make_prompt(length, seed=length) for length in lengths]
    answers = Answers()
    async with open_session() as session:

        def score(prompt: list[int], salt: str):
            return complete(
                session, server.url, prompt, GENERATED, salt=salt, score_prompt=True
            )

        async def crowd(salt: str) -> list[Completion]:
            decode = asyncio.create_task(
                stream(session, server.url, prompts[0], 200, salt=salt)
            )
            found = await asyncio.gather(*(score(p, salt) for p in prompts))
            await decode
            return found

        async def after_prefix(salt: str) -> list[Completion]:
            prefix = make_prompt(PREFIX_LENGTH, seed=1)
            await complete(session, server.url, prefix, 1, salt=salt)
            return [
                await complete(
                    session,
                    server.url,
                    prefix + make_prompt(length, seed=length + 1),
                    GENERATED,
                    salt=salt,
                )
                for length in SUFFIX_LENGTHS
            ]

        for prompt in prompts:
            await score(prompt, "warm-up")
        await crowd("warm-up")
        await after_prefix("warm-up")
        answers.warm_jit = server.jit_kernels()

        for prompt in prompts:
            answers.alone.append(
                [await score(prompt, f"alone {i}") for i in range(ALONE_REPEATS)]
            )
        rounds = [await crowd(f"crowd {i}") for i in range(CROWD_REPEATS)]
        answers.crowded = [list(runs) for runs in zip(*rounds, strict=True)]
        answers.prefixed = await after_prefix("prefix")

        answers.control = await score(control_prompt(prompts[-1]), "control")
    return answers


def ask(
    servers: dict[str, Server],
    ask_one: Callable[[Server], Awaitable[Answers]] = ask_server,
) -> dict[str, Answers]:
    """Put the scenario, or other requests, to all servers at the same time."""

    async def ask_all() -> list[Answers]:
        return await asyncio.gather(*map(ask_one, servers.values()))

    return dict(zip(servers, asyncio.run(ask_all()), strict=True))


def noise_budget(*runs_by_prompt: list[list[Completion]]) -> Difference:
    """Twice the widest spread of stock vLLM's answers to one prompt, across the lists.

    Alone and in a crowd a prompt is cut and batched differently, so stock's own
    answers differ by rounding and by keys that change places at the edge of the
    top-k.
    """
    noise = worst(spread(sum(runs, [])) for runs in zip(*runs_by_prompt, strict=True))
    return Difference(2 * max(noise.largest, STOCK_NOISE), 2 * noise.mean)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Is a multi-turn server slower for the opt-in: new prompts beside conversations?

    python3 benchmarks/benchmark_serving_multi_turn.py --csv multi-turn.csv

Thirty conversations over some 14,000 cached tokens each go on by a few new tokens a
turn, beside new prompts of 4096 tokens, every ninth request one. Every server gets the
same requests in the same order, up to 31 at a time, a turn when the one before it has
been answered. A history grows by its turns, and by as many other tokens as are
answered, up to a length at which the conversation begins anew. Turns of 16 tokens run
as decodes in vLLM's default backend on SM90; turns of 160 are prefills, which masked
MHA may take together with a prompt.

All servers are up from the start and one at a time is loaded, the variants in turn in
each of several rounds, after a warm-up that is not measured. Milliseconds to the first
token are counted at the HTTP client, percentiles over all rounds. In brackets: this
over stock, and the least and greatest of that among the rounds. ``cold`` are turns of
which the prefix cache had lost the history, ``compiled`` kernels that vLLM's JIT
monitor saw after the warm-up, ``tensors`` what they occupy on the GPU after a round.

Requests are text, which one process of a server reads by default; ``--api-servers``
gives it company. ``patched``, which dispatches as stock on SM90, shows how far equal
servers differ.

The servers have vLLM's defaults, CUDA graphs among them. By default one GPU does the
work of one tensor-parallel rank of 8 of DeepSeek-V3.2, in 36 of its 61 layers and
without the all-reduces. Three such servers take 120 GiB. Needs an SM90 GPU and the
package installed beside vLLM. Ends with 1 if a request failed or was cold. Ctrl-C keeps
the rounds that it has.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench_common import plain_parser, with_progress
from result_sections import multi_turn
from serving.client import Completion, make_text, open_session, stream
from serving.rounds import (
    Round,
    add_round_options,
    finish,
    percentiles,
    run_rounds,
)
from serving.server import Server
from serving.servers import (
    OWN_WORKER,
    add_server_options,
    parse_comparison,
    running_servers,
)

CONVERSATIONS = 30
AT_A_TIME = CONVERSATIONS + 1
# A conversation begins anew when its history has grown by so much.
BASE_TOKENS, GROWTH_TOKENS = 13632, 720
PROMPT_TOKENS = 4096
TURNS_A_PROMPT = 8
ANSWER_TOKENS = 8
MAX_MODEL_LEN = 16384
# Conversations and the last fifty prompts take 0.65 million tokens.
KV_CACHE_GIB = 28.0
# Of a history the last block, and the token that no step has computed, are not cached.
LOST_TOKENS = 256
COUNTS = ("failed", "cold", "masked MHA calls", "compiled", "tensors MiB")


@dataclass
class Conversation:
    """One user of one server."""

    number: int  # which one; the same on every server
    history: str = ""  # prompts and answers so far
    turns: int = 0  # how many were asked
    # Held until a turn is answered.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def base(self) -> str:
        """What every history of this conversation begins with."""
        return make_text(BASE_TOKENS, seed=self.number)

    def ask(self, new_tokens: int) -> str:
        """The prompt of the next turn."""
        if not BASE_TOKENS <= len(self.history) < BASE_TOKENS + GROWTH_TOKENS:
            self.history = self.base
        self.turns += 1
        return self.history + make_text(new_tokens, f"{self.number} asks {self.turns}")

    def answered(self, prompt: str) -> None:
        """Go on from a turn."""
        answer = make_text(ANSWER_TOKENS, f"{self.number} is answered {self.turns}")
        self.history = prompt + answer


@dataclass(kw_only=True)
class TurnsRound(Round):
    """What one server answered to one round."""

    # Answers to the new prompts, and to the conversations' turns.
    prompts: list[Completion] = field(default_factory=list)
    turns: list[Completion] = field(default_factory=list)
    cold: int = 0  # turns whose history was not cached

    def measures(self) -> dict[str, float]:
        found = {}
        for kind, answers in (("prompt", self.prompts), ("turn", self.turns)):
            ttft = [answer.ttft for answer in answers if answer.ok]
            found |= percentiles(f"{kind}: TTFT", ttft)
        failed = len(self.errors())
        answered = len(self.prompts) + len(self.turns) - failed
        found["requests/s"] = answered / self.seconds or math.nan
        counts = (failed, self.cold, self.masked, self.compiled, self.tensors_mib)
        return found | dict(zip(COUNTS, counts))

    def errors(self) -> list[str]:
        return [a.error for a in self.prompts + self.turns if not a.ok]


async def _take_turn(
    session, url: str, conversation: Conversation, new_tokens: int, found: TurnsRound
) -> None:
    async with conversation.lock:
        prompt = conversation.ask(new_tokens)
        answer = await stream(session, url, prompt, ANSWER_TOKENS)
        history = len(prompt) - new_tokens
        found.turns.append(answer)
        found.cold += answer.ok and answer.cached_tokens < history - LOST_TOKENS
        if answer.ok:
            conversation.answered(prompt)


async def run_round(
    session,
    url: str,
    conversations: Sequence[Conversation],
    new_tokens: int,
    num_prompts: int,
    seed: int,
) -> TurnsRound:
    """Send one server the requests of a round; no two rounds may share a seed.

    Each of the new prompts comes after ``TURNS_A_PROMPT`` turns, in the order of the
    conversations.
    """
    found = TurnsRound()
    turns = itertools.cycle(conversations)

    async def new_prompt(number: int) -> None:
        prompt = make_text(PROMPT_TOKENS, f"round {seed}, prompt {number}")
        found.prompts.append(await stream(session, url, prompt, ANSWER_TOKENS))

    def requests() -> Iterator:
        for number in range(num_prompts):
            for conversation in itertools.islice(turns, TURNS_A_PROMPT):
                yield _take_turn(session, url, conversation, new_tokens, found)
            yield new_prompt(number)

    async def work(queue: Iterator) -> None:
        for request in queue:
            await request

    queue = requests()
    start = time.perf_counter()
    await asyncio.gather(*(work(queue) for _ in range(AT_A_TIME)))
    found.seconds = time.perf_counter() - start
    return found


async def _fill_cache(session, url: str, conversations: Sequence[Conversation]):
    answers = await asyncio.gather(
        *(stream(session, url, conversation.base, 1) for conversation in conversations)
    )
    errors = [answer.error for answer in answers if not answer.ok]
    if errors:
        raise RuntimeError(f"{len(errors)} histories were refused: {errors[0]}")


async def measure(
    servers: dict[str, Server],
    turn_tokens: Sequence[int],
    rounds: int,
    num_prompts: int,
    time_limit: float = math.inf,
) -> dict[tuple[int, str], list[TurnsRound]]:
    """Rounds by turn length and variant."""
    users = {
        variant: [Conversation(i) for i in range(CONVERSATIONS)] for variant in servers
    }
    async with open_session() as session:

        async def run(variant: str, number: int, tokens: int, seed: int) -> TurnsRound:
            count = num_prompts if number else math.ceil(num_prompts / 4)
            url = servers[variant].url
            return await run_round(session, url, users[variant], tokens, count, seed)

        for variant, server in with_progress(servers.items(), "filling caches"):
            await _fill_cache(session, server.url, users[variant])
        schedule = itertools.product(range(rounds + 1), turn_tokens)
        return await run_rounds(servers, schedule, run, time_limit)


def main() -> None:
    """Command line."""
    parser = plain_parser(__doc__)
    add_server_options(parser, "dsv32-16h-36l", ranks=8)
    parser.add_argument(
        "--turn-tokens", type=int, nargs="+", default=[16, 160], metavar="N"
    )
    add_round_options(parser, rounds=10)
    parser.add_argument(
        "--prompts", type=int, default=24, help="new prompts of a round"
    )
    parser.add_argument(
        "--api-servers", type=int, default=1, metavar="N", help="of each server"
    )
    parser.set_defaults(plot=None)
    args = parse_comparison(parser)
    most = MAX_MODEL_LEN - BASE_TOKENS - GROWTH_TOKENS - ANSWER_TOKENS
    if not 1 <= min(args.turn_tokens) <= max(args.turn_tokens) <= most:
        parser.error(f"--turn-tokens must be from 1 to {most}, got {args.turn_tokens}")
    if min(args.rounds, args.prompts, args.api_servers) < 1:
        parser.error("--rounds, --prompts and --api-servers must be at least 1")
    with running_servers(
        args,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_gib=KV_CACHE_GIB,
        tokenizer=True,
        extra_args=(*OWN_WORKER, "--api-server-count", str(args.api_servers)),
    ) as servers:
        found = asyncio.run(
            measure(
                *(servers, args.turn_tokens, args.rounds),
                *(args.prompts, args.time_limit),
            )
        )
    finish(args, found, "turn tokens", COUNTS, multi_turn, bad=("failed", "cold"))


if __name__ == "__main__":
    main()

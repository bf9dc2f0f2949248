# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Is a day of mixed requests served worse for the opt-in, at any rate?

    python3 benchmarks/benchmark_serving_day.py --csv day.csv --plot day.svg

``vllm bench serve`` sends prompts of 1024 to 16384 tokens that ask for 1 to 256, both
as likely in each octave. Each begins with one of four system prompts, which the prefix
cache holds; the rest is new. They arrive at random, at three rates in turn. Beside
them a twentieth as many requests are given up by their client, while their prompt is
computed or after a few tokens.

Every server gets the same requests, one server at a time, the variants in turn in each
of several rounds, after a warm-up that is not measured. Percentiles are over all
rounds: of the milliseconds to the first token, and between two tokens. In brackets:
this over stock, and the least and greatest of that among the rounds. ``left`` are
requests that a server went on with though all were answered or given up, ``compiled``
kernels that vLLM's JIT monitor saw after the warm-up, ``tensors`` what they occupy on
the GPU after a round.

The servers have vLLM's defaults, CUDA graphs among them. By default one GPU does the
work of one tensor-parallel rank of 8 of DeepSeek-V3.2, in 36 of its 61 layers and
without the all-reduces. Needs an SM90 GPU, and the package and vLLM's ``bench`` extra
installed. Ends with 1 if a request failed or was left. Ctrl-C keeps the rounds that it
has.
"""

import asyncio
import contextlib
import io
import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bench_common import plain_parser
from result_sections import day
from serving.client import make_text, open_session, running_requests, stream
from serving.rounds import (
    Round,
    add_round_options,
    finish,
    percentiles,
    run_rounds,
)
from serving.server import MODEL_NAME, Server
from serving.servers import (
    OWN_WORKER,
    add_server_options,
    parse_comparison,
    running_servers,
)

SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 768
PROMPT_TOKENS = (1024, 16384)
ANSWER_TOKENS = (1, 256)
GIVEN_UP = 0.05  # of the requests that are answered
GIVEN_UP_AFTER_S = 0.03  # or after some tokens
WARM_UP = 0.25  # of a round
MAX_MODEL_LEN = sum(length[1] for length in (PROMPT_TOKENS, ANSWER_TOKENS))
KV_CACHE_GIB = 24.0
COUNTS = ("failed", "given up", "left", "masked MHA calls", "compiled")


def _length(bounds: tuple[int, int], generator: random.Random) -> int:
    """A length for which each octave is as likely."""
    low, high = np.log2(bounds)
    return round(2 ** generator.uniform(low, high))


def make_requests(count: int, seed: int) -> list[dict]:
    """Requests as vLLM's custom dataset has them: a text and how many tokens to make.

    The seed is of all but the system prompts; no two rounds may share one.
    """
    system = [make_text(SYSTEM_TOKENS, seed=i) for i in range(SYSTEM_PROMPTS)]
    generator = random.Random(f"requests {seed}")
    requests = []
    for number in range(count):
        new = _length(PROMPT_TOKENS, generator) - SYSTEM_TOKENS
        prompt = generator.choice(system) + make_text(new, f"request {seed} {number}")
        tokens = _length(ANSWER_TOKENS, generator)
        requests.append({"prompt": prompt, "output_tokens": tokens})
    return requests


@dataclass(kw_only=True)
class DayRound(Round):
    """What one server answered to one round at one rate."""

    # Seconds to the first token, of each answered request.
    ttft: list[float] = field(default_factory=list)
    # Seconds between two tokens, of all requests.
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0  # that were generated
    failed: list[str] = field(default_factory=list)  # what requests that failed came to
    given_up: int = 0  # requests that their client gave up
    left: int = 0  # requests that the server had not ended at last

    def measures(self) -> dict[str, float]:
        counts = (self.given_up, self.left, self.masked, self.compiled)
        return {
            "requests/s": len(self.ttft) / self.seconds,
            "output tokens/s": self.tokens / self.seconds,
            **percentiles("TTFT", self.ttft),
            **percentiles("inter-token", self.gaps),
            "tensors MiB": self.tensors_mib,
            **dict(zip(COUNTS, (len(self.failed), *counts))),
        }

    def errors(self) -> list[str]:
        return self.failed


async def _bench_serve(server: Server, requests: list[dict], rate: float, seed: int):
    """What ``vllm bench serve`` reports, with the times of each request."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    dataset = server.folder / "requests.jsonl"
    dataset.write_text("".join(json.dumps(request) + "\n" for request in requests))
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = parser.parse_args(
        [
            *("--base-url", server.url, "--model", str(server.model)),
            *("--served-model-name", MODEL_NAME, "--endpoint", "/v1/completions"),
            *("--dataset-name", "custom", "--dataset-path", str(dataset)),
            *("--custom-output-len", "-1", "--skip-chat-template"),
            *("--num-prompts", str(len(requests)), "--request-rate", str(rate)),
            *("--seed", str(seed), "--temperature", "0", "--ignore-eos"),
            *("--save-detailed", "--disable-tqdm"),
        ]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return await main_async(arguments)


async def _give_up(session, url: str, requests: list[dict], seconds: float) -> None:
    """Send requests, spread over some seconds, that their client does not wait for."""

    async def send(number: int, prompt: str) -> None:
        if number % 2:
            await stream(session, url, prompt, ANSWER_TOKENS[1], stop_after=4)
        else:
            with contextlib.suppress(TimeoutError):
                sent = stream(session, url, prompt, ANSWER_TOKENS[1])
                await asyncio.wait_for(sent, GIVEN_UP_AFTER_S)

    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            await asyncio.sleep(seconds / (len(requests) + 1))
            group.create_task(send(number, request["prompt"]))


async def _left(session, url: str) -> int:
    """Requests that a server still has, a few seconds after the last."""
    for _ in range(20):
        left = await running_requests(session, url)
        if left == 0:
            break
        await asyncio.sleep(0.25)
    return left


async def run_round(
    session, server: Server, rate: float, seconds: float, seed: int
) -> DayRound:
    """Send one server the requests of a round; no two rounds may share a seed."""
    count = max(1, round(rate * seconds))
    requests = make_requests(count, 2 * seed)
    given_up = make_requests(round(GIVEN_UP * count), 2 * seed + 1)
    answers, _ = await asyncio.gather(
        _bench_serve(server, requests, rate, seed),
        _give_up(session, server.url, given_up, seconds),
    )
    ok = [not error for error in answers["errors"]]
    return DayRound(
        seconds=answers["duration"],
        ttft=list(itertools.compress(answers["ttfts"], ok)),
        gaps=sum(itertools.compress(answers["itls"], ok), []),
        tokens=answers["total_output_tokens"],
        failed=[error for error in answers["errors"] if error],
        given_up=len(given_up),
        left=await _left(session, server.url),
    )


async def measure(
    servers: dict[str, Server],
    rates: Sequence[float],
    rounds: int,
    seconds: float,
    time_limit: float = math.inf,
) -> dict[tuple[float, str], list[DayRound]]:
    """Rounds by rate and variant."""
    # The warm-up is at the highest rate alone.
    schedule = [(0, max(rates)), *itertools.product(range(1, rounds + 1), rates)]
    async with open_session() as session:

        async def run(variant: str, number: int, rate: float, seed: int) -> DayRound:
            length = seconds if number else WARM_UP * seconds
            return await run_round(session, servers[variant], rate, length, seed)

        return await run_rounds(servers, schedule, run, time_limit)


def main() -> None:
    """Command line."""
    parser = plain_parser(__doc__)
    add_server_options(parser, "dsv32-16h-36l", ranks=8)
    parser.set_defaults(variants=["stock", "opt-in"])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 2, 3], metavar="R",
        help="requests a second (default: 1 2 3)",
    )  # fmt: skip
    add_round_options(parser, rounds=2)
    parser.add_argument(
        "--seconds", type=float, default=20, help="that a round takes at one rate"
    )
    parser.add_argument("--plot", type=Path)
    args = parse_comparison(parser)
    if min(*args.rates, args.rounds, args.seconds) <= 0:
        parser.error("--rates, --rounds and --seconds must be above 0")
    with running_servers(
        args,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_gib=KV_CACHE_GIB,
        tokenizer=True,
        extra_args=OWN_WORKER,
    ) as servers:
        found = asyncio.run(
            measure(servers, args.rates, args.rounds, args.seconds, args.time_limit)
        )
    finish(args, found, "rate", COUNTS, day, bad=("failed", "left"))


if __name__ == "__main__":
    main()

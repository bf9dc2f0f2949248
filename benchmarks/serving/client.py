# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Greedy completions over vLLM's HTTP API, prompts as token ids or as text."""

import asyncio
import json
import math
import random
import string
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import aiohttp

from serving.server import MODEL_NAME

REQUEST_TIMEOUT_S = 180.0
VOCAB_SIZE = 1024  # of every tiny model
# Each is a token by itself in the tiny models' vocabulary.
LETTERS = (string.ascii_uppercase + string.digits).replace("I", "")


@dataclass
class Completion:
    """What came back for one request."""

    status: int = 0  # HTTP status; 0 if the connection failed
    error: str = ""  # body of an error, or the connection's error; empty on success
    # Generated tokens; empty for a text that is streamed.
    token_ids: list[int] = field(default_factory=list)
    # Log-probability of each generated token, natural log.
    logprobs: list[float] = field(default_factory=list)
    # Distance from the best to the second-best log-probability at each generated token.
    gaps: list[float] = field(default_factory=list)
    # Log-probability of each prompt token but the first.
    prompt_logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens that the prefix cache served
    ttft: float = math.nan  # seconds to the first token; only of streamed requests

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status == 200 and not self.error


def open_session() -> aiohttp.ClientSession:
    """A session without a limit on connections, a new one for each request.

    The server closes a connection that idles for some seconds; a request that takes it
    up at that moment would fail for no fault of the server's.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    )


def make_prompt(length: int, seed: int) -> list[int]:
    """``length`` random token ids, the two special ones left out."""
    generator = random.Random(seed)
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(length)]


def make_text(length: int, seed: int | str) -> str:
    """A random text of ``length`` tokens and as many characters."""
    return "".join(random.Random(seed).choices(LETTERS, k=length))


def _body(prompt: list[int] | str, max_tokens: int, salt: str | None) -> dict:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    return body


def _cached_tokens(answer: dict) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def gap(logprobs: Iterable[float]) -> float:
    """Distance from the best to the second-best."""
    best, second = sorted(logprobs, reverse=True)[:2]
    return best - second


async def _parse(completion: Completion, response: aiohttp.ClientResponse) -> None:
    answer = await response.json()
    choice = answer["choices"][0]
    completion.token_ids = choice["token_ids"]
    completion.logprobs = choice["logprobs"]["token_logprobs"]
    for top in choice["logprobs"]["top_logprobs"]:
        completion.gaps.append(gap(top.values()))
    for token in choice.get("prompt_logprobs") or []:
        if token is not None:
            # The prompt's own token comes first; others only with a count above 0.
            completion.prompt_logprobs.append(next(iter(token.values()))["logprob"])
    completion.cached_tokens = _cached_tokens(answer)


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int] | str,
    max_tokens: int,
    *,
    salt: str | None = None,
    score_prompt: bool = False,
) -> Completion:
    """One completion with log-probabilities; errors are in it and are not raised.

    Args:
        session: From ``open_session``.
        url: The server's base address.
        prompt: Token ids, or text for a server with a tokenizer.
        max_tokens: Tokens to generate; exactly that many are.
        salt: Requests share prefix-cache entries only if their salts are equal.
        score_prompt: Also ask for the log-probability of every prompt token;
            vLLM then computes the whole prompt anew.
    """
    body = _body(prompt, max_tokens, salt)
    body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    if score_prompt:
        body["prompt_logprobs"] = 0
    return await _post(session, f"{url}/v1/completions", body, _parse)


async def chat(
    session: aiohttp.ClientSession, url: str, text: str, max_tokens: int, *, salt: str
) -> Completion:
    """One chat completion of a user's message; the rest as in ``complete``."""
    body = _body([], max_tokens, salt)
    del body["prompt"]
    body["messages"] = [{"role": "user", "content": text}]
    body |= {"logprobs": True, "top_logprobs": 2}
    return await _post(session, f"{url}/v1/chat/completions", body, _parse_chat)


async def _parse_chat(completion: Completion, response: aiohttp.ClientResponse) -> None:
    choice = (await response.json())["choices"][0]
    completion.token_ids = choice["token_ids"]
    for token in choice["logprobs"]["content"]:
        completion.logprobs.append(token["logprob"])
        completion.gaps.append(gap(top["logprob"] for top in token["top_logprobs"]))


async def _post(
    session: aiohttp.ClientSession,
    url: str,
    body: dict,
    read: Callable[[Completion, aiohttp.ClientResponse], Awaitable[None]],
) -> Completion:
    """Send a request, and have its answer read if it is a success."""
    completion = Completion()
    try:
        async with session.post(url, json=body) as response:
            completion.status = response.status
            if response.status == 200:
                await read(completion, response)
            else:
                completion.error = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        completion.error = repr(error)
    return completion


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int] | str,
    max_tokens: int,
    *,
    salt: str | None = None,
    stop_after: int | None = None,
) -> Completion:
    """One streamed completion, timed; arguments as of ``complete``.

    The connection is closed after ``stop_after`` tokens, if given.
    """
    body = _body(prompt, max_tokens, salt)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream": True, "stream_options": usage}
    # With the answer's ids the prompt's would come back too.
    body["return_token_ids"] = not isinstance(prompt, str)

    async def read(completion: Completion, response: aiohttp.ClientResponse) -> None:
        tokens = 0
        async for line in response.content:
            payload = line.decode().strip().removeprefix("data: ")
            if not payload or payload == "[DONE]":
                continue
            event = json.loads(payload)
            if "error" in event:
                completion.error = payload
                return
            for choice in event["choices"]:
                completion.token_ids += choice.get("token_ids") or []
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
                completion.cached_tokens = _cached_tokens(event)
            if tokens and math.isnan(completion.ttft):
                completion.ttft = time.perf_counter() - start
            if stop_after is not None and tokens >= stop_after:
                response.close()
                return
        if tokens != max_tokens:
            completion.error = f"{tokens} of {max_tokens} tokens came"

    start = time.perf_counter()
    return await _post(session, f"{url}/v1/completions", body, read)


async def burst(
    session: aiohttp.ClientSession, url: str, length: int, count: int, salt: str
) -> list[float]:
    """Milliseconds to the first token of ``count`` requests sent at once.

    Raises:
        RuntimeError: One failed.
    """
    answers = await asyncio.gather(
        *(
            stream(session, url, make_prompt(length, seed=i), 1, salt=f"{salt} {i}")
            for i in range(count)
        )
    )
    errors = [answer.error for answer in answers if not answer.ok]
    if errors:
        raise RuntimeError(f"{len(errors)} of {count} requests failed: {errors[0]}")
    return [answer.ttft * 1e3 for answer in answers]


async def running_requests(session: aiohttp.ClientSession, url: str) -> int:
    """Requests that the engine has running or waiting."""
    found = await metrics(session, url)
    return int(found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"])


async def metrics(session: aiohttp.ClientSession, url: str) -> Counter[str]:
    """``/metrics`` by name, added up over labels; one that is not there is 0."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    found = Counter()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            labelled, value = line.rsplit(" ", 1)
            found[labelled.partition("{")[0]] += float(value)
    return found

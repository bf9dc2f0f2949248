# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The client against vLLM's own request and answer classes, without an engine."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from serving.client import (
    chat,
    complete,
    metrics,
    open_session,
    running_requests,
    stream,
)
from serving.server import free_port

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo
from vllm.logprobs import Logprob

PROMPT, TEXT = [5, 6, 7], "abc"
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="model"} 2.0
vllm:num_requests_waiting{engine="0",model_name="model"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 4.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="a b"} 3.0
"""


def _usage() -> UsageInfo:
    return UsageInfo(prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=64))


def _answer(request: CompletionRequest) -> CompletionResponse:
    choice = CompletionResponseChoice(
        index=0,
        text="",
        token_ids=[3, 4],
        logprobs=CompletionLogProbs(
            tokens=["token_id:3", "token_id:4"],
            token_logprobs=[-0.5, -0.25],
            top_logprobs=[
                {"token_id:3": -0.5, "token_id:9": -1.5},
                {"token_id:4": -0.25, "token_id:9": -0.5},
            ],
        ),
        prompt_logprobs=(
            None
            if request.prompt_logprobs is None
            else [None, {6: Logprob(-2.0, 4)}, {7: Logprob(-3.0, 5)}]
        ),
    )
    return CompletionResponse(model="model", choices=[choice], usage=_usage())


async def _completions(http: web.Request) -> web.StreamResponse:
    request = CompletionRequest(**await http.json())
    # Raises where vLLM would refuse the request.
    request.to_sampling_params(request.max_tokens, {})
    if request.prompt not in (PROMPT, TEXT):
        return web.json_response({"error": "too long"}, status=400)
    if not request.stream:
        return web.json_response(text=_answer(request).model_dump_json())
    response = web.StreamResponse()
    await response.prepare(http)
    assert request.stream_options.continuous_usage_stats
    for token in range(request.max_tokens):
        ids = [token] if request.return_token_ids else None
        choice = CompletionResponseStreamChoice(index=0, text="", token_ids=ids)
        usage = UsageInfo(completion_tokens=token + 1)
        chunk = CompletionStreamResponse(model="model", choices=[choice], usage=usage)
        text = chunk.model_dump_json(exclude_unset=False)
        await response.write(f"data: {text}\n\n".encode())
        await asyncio.sleep(0)
    if request.stream_options.include_usage:
        # As vLLM does, in a chunk of its own without choices.
        usage = _usage()
        usage.completion_tokens = request.max_tokens
        chunk = CompletionStreamResponse(model="model", choices=[], usage=usage)
        text = chunk.model_dump_json(exclude_unset=False)
        await response.write(f"data: {text}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def _chat(http: web.Request) -> web.Response:
    request = ChatCompletionRequest(**await http.json())
    # Raises where vLLM would refuse the request.
    request.to_sampling_params(2, {})
    assert request.messages == [{"role": "user", "content": "hi"}]
    assert request.ignore_eos and request.return_token_ids
    tokens = [(-0.5, -1.5), (-0.25, -0.5)]
    content = [
        ChatCompletionLogProbsContent(
            token="a",
            logprob=best,
            top_logprobs=[
                ChatCompletionLogProb(token="a", logprob=logprob)
                for logprob in (best, second)
            ],
        )
        for best, second in tokens
    ]
    choice = ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content="aa"),
        logprobs=ChatCompletionLogProbs(content=content),
        token_ids=[3, 4],
    )
    answer = ChatCompletionResponse(model="model", choices=[choice], usage=_usage())
    return web.json_response(text=answer.model_dump_json())


async def _metrics(http: web.Request) -> web.Response:
    return web.Response(text=METRICS)


@pytest.fixture
def ask():
    """Runs ``ask(coroutine_function)`` with a session and a served address."""

    async def run(function):
        app = web.Application()
        app.router.add_post("/v1/completions", _completions)
        app.router.add_post("/v1/chat/completions", _chat)
        app.router.add_get("/metrics", _metrics)
        async with TestServer(app) as server, open_session() as session:
            return await function(session, f"http://{server.host}:{server.port}")

    return lambda function: asyncio.run(run(function))


@pytest.mark.parametrize("score_prompt", [False, True])
def test_complete(ask, score_prompt):
    found = ask(
        lambda session, url: complete(
            session, url, PROMPT, 2, salt="s", score_prompt=score_prompt
        )
    )
    assert found.ok
    assert found.token_ids == [3, 4]
    assert found.logprobs == [-0.5, -0.25]
    assert found.gaps == [1.0, 0.25]
    assert found.prompt_logprobs == ([-2.0, -3.0] if score_prompt else [])
    assert found.cached_tokens == 64


def test_chat(ask):
    found = ask(lambda session, url: chat(session, url, "hi", 2, salt="s"))
    assert found.ok
    assert found.token_ids == [3, 4]
    assert found.logprobs == [-0.5, -0.25]
    assert found.gaps == [1.0, 0.25]


@pytest.mark.parametrize("prompt", [PROMPT, TEXT], ids=["ids", "text"])
def test_stream(ask, prompt):
    found = ask(lambda session, url: stream(session, url, prompt, 5))
    assert found.ok
    assert found.token_ids == ([0, 1, 2, 3, 4] if prompt == PROMPT else [])
    assert found.cached_tokens == 64
    assert found.ttft > 0


def test_stream_can_be_left(ask):
    found = ask(lambda session, url: stream(session, url, PROMPT, 50, stop_after=3))
    assert 3 <= len(found.token_ids) < 50


@pytest.mark.parametrize("request_one", [complete, stream])
def test_refusal_is_an_answer(ask, request_one):
    found = ask(lambda session, url: request_one(session, url, [1], 2))
    assert (found.status, found.ok) == (400, False)
    assert json.loads(found.error) == {"error": "too long"}


@pytest.mark.parametrize("request_one", [complete, stream])
def test_no_server_is_an_answer(ask, request_one):
    url = f"http://127.0.0.1:{free_port()}"
    found = ask(lambda session, _: request_one(session, url, PROMPT, 2))
    assert (found.status, found.ok) == (0, False)
    assert "Connect" in found.error


def test_running_requests(ask):
    assert ask(running_requests) == 3


def test_metrics_are_added_up(ask):
    found = ask(metrics)
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 7
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 0

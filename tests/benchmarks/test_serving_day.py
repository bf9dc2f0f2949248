# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The day's mix of requests: `vllm bench serve` itself against made-up servers."""

import asyncio
import json
from types import SimpleNamespace

import benchmark_serving_day as day
import plots
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from bench_common import origin
from result_sections import day as section
from serving import rounds
from serving.rounds import compared_rows
from tokenizers import Tokenizer

from vllm_sparse_mla.testing.tiny_model import get_spec, make_config
from vllm_sparse_mla.testing.tiny_tokenizer import write_tokenizer

RATE, SECONDS, ROUNDS = 60, 1.0, 1


class Served:
    """Streams as many tokens as are asked for, and notes what was asked.

    Attributes:
        asked: prompts and lengths of the answers.
        given_up: requests whose client did not wait for the answer.
    """

    def __init__(self, delay: float, refuses: bool = False):
        self.asked: list[tuple[str, int]] = []
        self.given_up = self.running = 0
        self._delay, self._refuses = delay, refuses

    def to_answer(self) -> list[str]:
        """Prompts of all but the requests that are given up, which ask for most."""
        return sorted(p for p, tokens in self.asked if tokens < day.ANSWER_TOKENS[1])

    async def completions(self, http: web.Request) -> web.StreamResponse:
        request = await http.json()
        self.asked.append((request["prompt"], request["max_tokens"]))
        assert request["ignore_eos"] and request["temperature"] == 0
        if self._refuses and len(self.asked) % 2:
            return web.json_response({"error": "no"}, status=500)
        response = web.StreamResponse()
        await response.prepare(http)
        self.running += 1
        try:
            await asyncio.sleep(self._delay)
            for token in range(request["max_tokens"]):
                choice = {"index": 0, "text": "x", "token_ids": [token]}
                await self._send(response, {"choices": [choice]})
            usage = {"prompt_tokens": 1, "completion_tokens": request["max_tokens"]}
            await self._send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.given_up += 1
        finally:
            self.running -= 1
        return response

    async def _send(self, response: web.StreamResponse, chunk: dict) -> None:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await asyncio.sleep(0)

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=f"vllm:num_requests_running{{}} {self.running}\n")


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Function that measures variants of `Served`: rows."""
    spec = get_spec("dsv32-16h-36l")
    (tmp_path / "config.json").write_text(json.dumps(make_config(spec)))
    write_tokenizer(tmp_path, spec.vocab_size)
    monkeypatch.setattr(rounds, "read_records", lambda folder: [])
    monkeypatch.setattr(rounds, "gpu_mib_at", lambda *args: {"allocated": 3})

    async def run(served: dict[str, Served]) -> list[dict]:
        servers = {}
        for variant, answers in served.items():
            app = web.Application()
            app.router.add_post("/v1/completions", answers.completions)
            app.router.add_get("/metrics", answers.metrics)
            # Ends a request when its client is gone, as vLLM does.
            server = TestServer(app)
            await server.start_server()
            servers[variant] = SimpleNamespace(
                url=f"http://{server.host}:{server.port}",
                model=tmp_path,
                folder=tmp_path,
                jit_kernels=lambda: [],
            )
        found = await day.measure(servers, [RATE], ROUNDS, SECONDS)
        return compared_rows(found, "rate", day.COUNTS)

    return lambda **served: asyncio.run(run(served))


def value(rows: list[dict], measure: str, variant: str, column: str = "value"):
    (row,) = (r for r in rows if (r["measure"], r["variant"]) == (measure, variant))
    return row[column]


def test_servers_get_the_same_requests_and_are_compared(measure):
    stock, here = Served(0.02), Served(0.2)
    rows = measure(stock=stock, here=here)
    count, given_up = RATE * SECONDS, day.GIVEN_UP * RATE * SECONDS
    assert stock.to_answer() == here.to_answer()
    # The warm-up's too; no prompt twice, for it would be cached.
    assert len(set(stock.to_answer())) == (1 + day.WARM_UP) * count
    assert stock.given_up >= given_up / 3 and here.given_up >= given_up / 3
    for variant in ("stock", "here"):
        assert value(rows, "given up", variant) == given_up
        assert value(rows, "failed", variant) == value(rows, "left", variant) == 0
        assert value(rows, "tensors MiB", variant) == 3
        assert value(rows, "output tokens/s", variant) > 0
    assert 20 <= value(rows, "TTFT p50 ms", "stock") < 200
    assert value(rows, "TTFT p50 ms", "here") >= 200
    text = section(rows)
    ratio = value(rows, "TTFT p50 ms", "here", "/ stock")
    assert f"TTFT p50 ms, {RATE} requests/s sent ({ratio:.3f})" in text
    assert "tensors" not in text.partition("Worse than stock")[2]


def test_what_failed_is_counted_and_not_timed(measure):
    rows = measure(stock=Served(0.0, refuses=True))
    failed = value(rows, "failed", "stock")
    answered = RATE * SECONDS - failed
    assert failed > 0 and answered > 0
    assert value(rows, "left", "stock") == 0
    assert value(rows, "requests/s", "stock") > 0


def test_requests_are_a_mix_of_lengths_over_shared_beginnings():
    spec = get_spec("dsv32-16h-36l")
    assert spec.max_position_embeddings >= day.MAX_MODEL_LEN
    requests = day.make_requests(400, 1)
    lengths = sorted(len(request["prompt"]) for request in requests)
    low, high = day.PROMPT_TOKENS
    assert low <= lengths[0] < 2 * low and high / 2 < lengths[-1] <= high
    assert 0.35 < sum(length < (low * high) ** 0.5 for length in lengths) / 400 < 0.65
    answers = {request["output_tokens"] for request in requests}
    assert 1 in answers and day.ANSWER_TOKENS[1] / 2 < max(answers) <= 256
    begins = {request["prompt"][: day.SYSTEM_TOKENS] for request in requests}
    assert len(begins) == day.SYSTEM_PROMPTS
    assert begins == {
        request["prompt"][: day.SYSTEM_TOKENS] for request in day.make_requests(99, 2)
    }


def test_a_letter_is_a_token(tmp_path):
    write_tokenizer(tmp_path, get_spec("dsv32-16h-36l").vocab_size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for request in day.make_requests(3, 1):
        encoded = tokenizer.encode(request["prompt"])
        assert len(encoded.ids) == len(request["prompt"])


def test_rows_are_drawn(tmp_path):
    rounds = [day.DayRound(seconds=2.0, ttft=[0.1, 0.2], gaps=[0.01], tokens=5)]
    found = {(rate, v): rounds for rate in (4, 8) for v in ("stock", "opt-in")}
    script = "python3 benchmarks/benchmark_serving_day.py"
    rows = [
        {"model": "m"} | row | origin() | {"command": script}
        for row in compared_rows(found, "rate", day.COUNTS)
    ]
    plots.draw(tmp_path / "day.svg", rows)
    text = (tmp_path / "day.svg").read_text()
    assert "inter-token p99 ms" in text and "requests a second" in text

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` with the patch set, end to end, beside stock vLLM.

Three servers of one installation share the GPU: stock, patched, and patched with
the Hopper opt-in. All are asked the same at the same time, and judged as the launches
of ``test_launches`` are.

With a quantized cache the opt-in attends to a step's own tokens before they are
rounded, and stock's sparse MQA after. Stock's own spread has that difference in it:
short prompts run dense MHA when they are alone, and sparse MQA amid long ones.
"""

import json

import pytest
from serving import judge, scenario
from serving.probe import read_records
from serving.scenario import PROMPT_LENGTHS, Answers
from serving.server import VARIANTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("servers", ["auto", "fp8"], indirect=True),
]


@pytest.fixture(scope="module")
def answers(servers) -> dict[str, Answers]:
    return scenario.ask(servers)


@pytest.fixture(scope="module")
def calls(answers, servers, report_dir) -> dict[str, list[dict]]:
    """The calls of masked MHA by variant."""
    found = {name: read_records(s.folder) for name, s in servers.items()}
    if report_dir is not None:
        report = judge.describe(servers, answers, found)
        name = f"differences-{servers['stock'].kv_cache_dtype}.json"
        (report_dir / name).write_text(json.dumps(report, indent=1))
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_request_is_answered(answers, variant):
    found = answers[variant]
    assert [c.error for c in found.everything() if not c.ok] == []
    assert {len(c.token_ids) for c in found.everything()} == {scenario.GENERATED}
    for length, runs in zip(PROMPT_LENGTHS, found.by_prompt(), strict=True):
        assert {len(c.prompt_logprobs) for c in runs} == {length - 1}
    # The cache serves whole blocks of 64 tokens.
    cached = [c.cached_tokens for c in found.prefixed]
    assert min(cached) > scenario.PREFIX_LENGTH - 64


def test_all_answer_alike(answers, calls):
    assert judge.judge_answers(answers) == []


def test_masked_mha_runs_only_with_the_opt_in(calls):
    assert judge.judge_masked_mha(calls, masked=True) == []
    taken = calls["opt-in"]
    # Prefills of new tokens, and of contexts.
    assert {c["causal"] for c in taken} == {True, False}
    assert {c["num_heads"] for c in taken} == {128}


def test_each_process_says_that_it_is_active_and_nothing_more_is_compiled(
    answers, servers
):
    assert judge.judge_logs(servers, answers) == []
    for server in servers.values():
        assert "Kernel JIT monitor activated" in server.log_text()

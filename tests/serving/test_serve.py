# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` with the patch set, end to end, beside stock vLLM.

Three servers of one installation share the GPU: stock, patched, and patched with
the Hopper opt-in. All are asked the same at the same time; the tests then judge.

With a quantized cache the opt-in attends to a step's own tokens before they are
rounded, and stock's sparse MQA after. Stock's own spread has that difference in it:
short prompts run dense MHA when they are alone, and sparse MQA amid long ones.
"""

import json
from dataclasses import asdict

import pytest
from serving import scenario
from serving.compare import Difference, between, difference, spread
from serving.judge import compiled_beyond_stock
from serving.probe import read_records
from serving.scenario import PROMPT_LENGTHS, Answers
from serving.server import VARIANTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("servers", ["auto", "fp8"], indirect=True),
]

by_prompt = pytest.mark.parametrize(
    "index", range(len(PROMPT_LENGTHS)), ids=map(str, PROMPT_LENGTHS)
)
patched_variants = pytest.mark.parametrize("variant", ["patched", "opt-in"])


@pytest.fixture(scope="module")
def answers(servers) -> dict[str, Answers]:
    return scenario.ask(servers)


@pytest.fixture(scope="module")
def budget(answers, servers, report_dir) -> Difference:
    stock = answers["stock"].by_prompt()
    found = scenario.noise_budget(stock)
    if report_dir is not None:
        report = {"budget": asdict(found)}
        for variant, other in answers.items():
            report[variant] = {
                length: asdict(between(a, b))
                for length, a, b in zip(
                    PROMPT_LENGTHS, stock, other.by_prompt(), strict=True
                )
            }
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


@by_prompt
def test_patched_is_identical_where_stock_is_to_itself(answers, budget, index):
    stock = answers["stock"].alone[index]
    found = between(stock, answers["patched"].alone[index])
    if spread(stock).identical:
        assert found.identical, found
    else:
        assert found.within(budget), (found, budget)


@by_prompt
@patched_variants
def test_answers_are_within_the_budget(answers, budget, variant, index):
    stock = answers["stock"].by_prompt()[index]
    found = between(stock, answers[variant].by_prompt()[index])
    assert found.within(budget), (found, budget)


@patched_variants
def test_shared_prefix(answers, budget, variant):
    pairs = zip(answers["stock"].prefixed, answers[variant].prefixed, strict=True)
    for stock, found in pairs:
        # The cache serves whole blocks of 64 tokens.
        assert stock.cached_tokens == found.cached_tokens
        assert stock.cached_tokens > scenario.PREFIX_LENGTH - 64
        # A mean over few tokens is no tighter than its largest part.
        bound = Difference(budget.largest, budget.largest)
        assert difference(stock, found).within(bound), (found, bound)


@pytest.mark.parametrize("variant", VARIANTS)
def test_changed_keys_are_seen(answers, budget, variant):
    """Negative control: a quarter of the keys replaced exceeds the budget.

    Compared is the second half of the prompt, whose own tokens are unchanged.
    """
    found = scenario.control_difference(
        answers[variant].alone[-1][0], answers[variant].control
    )
    assert found.mean > 2 * budget.mean, (found, budget)
    assert found.largest > budget.largest, (found, budget)


def test_masked_mha_runs_only_with_the_opt_in(answers, servers):
    records = {name: read_records(s.log_path.parent) for name, s in servers.items()}
    assert records["stock"] == records["patched"] == []
    calls = records["opt-in"]
    assert any(c["causal"] for c in calls), "no prefill took masked MHA"
    assert any(not c["causal"] for c in calls), "no context took masked MHA"
    assert {c["num_heads"] for c in calls} == {128}


def test_one_line_per_process_says_that_it_is_active(servers):
    assert servers["stock"].active_pids() == []
    for variant in ("patched", "opt-in"):
        server = servers[variant]
        processes = [server.process.pid, *(p.pid for p in server.engine_processes())]
        assert sorted(server.active_pids()) == sorted(processes)


@patched_variants
def test_nothing_more_than_stock_is_compiled_while_serving(answers, servers, variant):
    log = servers[variant].log_text()
    if "Kernel JIT monitor activated" not in log:
        pytest.skip("vLLM's JIT monitor is off in these servers (--enforce-eager)")
    assert compiled_beyond_stock(servers, answers, variant) == set()

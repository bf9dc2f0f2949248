# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the launches' judge complains about, from answers and logs that were made up."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving.client import Completion
from serving.judge import (
    judge_acceptance,
    judge_answers,
    judge_logs,
    judge_masked_mha,
)
from serving.scenario import Answers
from serving.server import Server

ACTIVE = "(pid={}) vllm-sparse-mla 0.1.0 is active on vLLM 0.33.0: some.py\n"
COMPILED = "Triton kernel JIT compilation during inference: {} (constexprs={{}}). It\n"


def _completion(shift: float = 0.0, **fields) -> Completion:
    given = {
        "status": 200,
        "token_ids": [3, 4],
        "logprobs": [-0.5, -0.25 + shift],
        "gaps": [1.0, 1.0],
        "prompt_logprobs": [-1.0, -2.0, -3.0, -4.0 + shift],
    }
    return Completion(**given | fields)


def _answers(shift: float = 0.0, *, control: float = 3.0, repeat: float = 0.0, **after):
    return Answers(
        alone=[[_completion(shift), _completion(shift + repeat)]],
        prefixed=[_completion(shift, prompt_logprobs=[], **after)],
        control=_completion(control),
    )


def _judge(**others: Answers) -> list[str]:
    # Stock's spread, 0.02, is below what it was seen to be elsewhere, 0.03.
    stock = {"stock": _answers(repeat=0.02)}
    return judge_answers(stock | {"patched": _answers(), "opt-in": _answers()} | others)


def test_answers_that_agree():
    assert _judge() == []
    assert _judge(**{"opt-in": _answers(0.003)}) == []


def test_the_mean_of_a_few_tokens_may_be_as_large_as_one_of_them():
    def unscored(shift: float) -> Answers:
        answers = _answers(repeat=0.02)
        few = {"prompt_logprobs": [], "token_ids": [3]}
        own = [_completion(**few, logprobs=[-0.5 - by]) for by in (0, shift)]
        return replace(answers, alone=[own, *answers.alone])

    def judge(shift: float) -> list[str]:
        stock, other = unscored(0.0), unscored(shift)
        return judge_answers({"stock": stock, "opt-in": other})

    assert judge(0.05) == []
    assert "opt-in, prompt 0" in " ".join(judge(0.07))
    # The control's mean is over a prompt, and is held to the spread of such means.
    assert judge_answers({"stock": unscored(0.5)}) == []


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        ({"opt-in": _answers(0.5)}, "opt-in, prompt 0"),
        ({"patched": _answers(0.5)}, "patched, prompt 0"),
        ({"opt-in": _answers(control=0.05)}, "opt-in: other keys go unnoticed"),
        ({"opt-in": _answers(cached_tokens=64)}, "opt-in, after prefix 0"),
        ({"opt-in": _answers(status=500, error="dead")}, "opt-in: dead"),
        (
            {"stock": _answers(), "patched": _answers(0.001)},
            "patched, prompt 0: stock repeats itself",
        ),
    ],
    ids=["opt-in", "patched", "control", "cached", "failed", "identical"],
)
def test_answers_that_do_not(others, complaint):
    assert complaint in " ".join(_judge(**others))


def test_masked_mha_is_for_the_opt_in():
    calls = {"stock": [], "patched": [], "opt-in": [{}]}
    assert judge_masked_mha(calls, True) == []
    assert judge_masked_mha(calls, False) == ["opt-in: 1 calls of masked MHA"]
    assert judge_masked_mha(calls | {"opt-in": []}, True) == [
        "opt-in: 0 calls of masked MHA"
    ]
    assert judge_masked_mha(calls | {"stock": [{}]}, True) == [
        "stock: 1 calls of masked MHA"
    ]


class _Running(Server):
    def engine_processes(self) -> list:
        return [SimpleNamespace(pid=8)]


def _judge_logs(folder: Path, **logs: str) -> list[str]:
    servers, pid = {}, os.getpid()
    for variant, log in ({"stock": "", "patched": ""} | logs).items():
        server = _Running(folder, variant, folder / variant)
        server.process = SimpleNamespace(pid=pid)
        server.folder.mkdir(exist_ok=True)
        server.log_path.write_text(log)
        servers[variant] = server
    answers = {name: Answers(warm_jit=["one"]) for name in servers}
    return judge_logs(servers, answers)


def test_logs(tmp_path):
    active = ACTIVE.format(os.getpid()) + ACTIVE.format(8)
    one, two = COMPILED.format("one"), COMPILED.format("two")
    assert _judge_logs(tmp_path, patched=active) == []
    assert _judge_logs(tmp_path, patched=active + one, stock=one) == []
    (complaint,) = _judge_logs(tmp_path, patched=ACTIVE.format(8))
    assert "patched: active in [8], not" in complaint
    (complaint,) = _judge_logs(tmp_path, patched=active, stock=active)
    assert "stock: active in" in complaint
    (complaint,) = _judge_logs(tmp_path, patched=active + one + two, stock=one)
    assert complaint == "patched: compiled while serving: ['two']"
    # Of what was compiled before it is asked only where stock had it ready by then.
    (complaint,) = _judge_logs(tmp_path, patched=active + one + one, stock=one)
    assert complaint == "patched: compiled while serving: ['one']"
    experts = COMPILED.format("fused_moe_kernel")
    twice = active + one + experts + experts
    assert _judge_logs(tmp_path, patched=twice, stock=one + experts) == []
    assert len(_judge_logs(tmp_path, patched=active + experts)) == 1


@pytest.mark.parametrize(
    ("stock", "other", "fits"),
    [
        ((1000, 400), (1000, 400), True),
        ((1000, 400), (1000, 430), True),
        ((1000, 400), (1000, 480), False),
        ((1000, 400), (0, 0), False),
        ((1000, 0), (1000, 0), False),
        ((0, 0), (0, 0), False),
    ],
    ids=[
        "same",
        "by-rounding",
        "more",
        "no-drafts",
        "none-accepted",
        "stock-no-drafts",
    ],
)
def test_acceptance(stock, other, fits):
    assert (judge_acceptance({"stock": stock, "opt-in": other}) == []) is fits

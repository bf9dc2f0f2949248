# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The process around vLLM's ``LLM``, with an ``LLM`` that makes answers up."""

import json
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from serving import offline
from serving.scenario import GENERATED, PROMPT_LENGTHS

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.logprobs import Logprob


def _logprobs(token: int) -> dict[int, Logprob]:
    return {token: Logprob(-0.5, 1), token + 1: Logprob(-1.5, 2)}


class _MadeUp:
    def __init__(self, model, **kwargs):
        assert {*kwargs} <= {field.name for field in fields(EngineArgs)}

    def generate(self, prompts, params, use_tqdm):
        assert params.max_tokens == GENERATED
        found = []
        for prompt in prompts:
            tokens = prompt["prompt_token_ids"]
            answer = SimpleNamespace(
                token_ids=[3] * GENERATED, logprobs=[_logprobs(3)] * GENERATED
            )
            found.append(
                SimpleNamespace(
                    prompt_token_ids=tokens,
                    prompt_logprobs=[None, *map(_logprobs, tokens[1:])],
                    outputs=[answer],
                )
            )
        return found


class _Program(offline.OfflineRun):
    code = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code, str(self.answers_path)]


def test_answers_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "LLM", _MadeUp, raising=False)
    offline.main("model", str(tmp_path / "main.json"))
    run = _Program(tmp_path, "stock", tmp_path)
    run.code = (
        f"import sys, shutil; shutil.copy({str(tmp_path / 'main.json')!r}, sys.argv[1])"
    )
    answers = run.start().wait_answers()
    run.stop()
    assert [len(runs) for runs in answers.alone] == [3] * len(PROMPT_LENGTHS)
    assert all(completion.ok for completion in answers.everything())
    for length, runs in zip(PROMPT_LENGTHS, answers.alone, strict=True):
        for found in runs:
            assert found.prompt_logprobs == [-0.5] * (length - 1)
            assert found.logprobs == [-0.5] * GENERATED
            assert found.gaps == [1.0] * GENERATED
    assert len(answers.control.prompt_logprobs) == PROMPT_LENGTHS[-1] - 1
    assert json.loads((tmp_path / "main.json").read_text())["prefixed"] == []


def test_failed_run_shows_its_log(tmp_path):
    run = _Program(tmp_path, "patched", tmp_path)
    run.code = "raise OSError('no such model')"
    run.start()
    with pytest.raises(RuntimeError, match="(?s)patched run failed.*no such model"):
        run.wait_answers()
    run.stop()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's offline ``LLM`` in a process of its own, asked what servers are asked.

python -m serving.offline MODEL_FOLDER ANSWERS.json
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from serving.client import Completion, gap, make_prompt
from serving.scenario import (
    GENERATED,
    MAX_MODEL_LEN,
    PROMPT_LENGTHS,
    TOKEN_BUDGET,
    Answers,
    control_prompt,
)
from serving.server import Server

RUNS = 2


class OfflineRun(Server):
    """Such a process, with a server's environment and log; it ends by itself."""

    @property
    def answers_path(self) -> Path:
        """Gets the answers."""
        return self.folder / "answers.json"

    def command(self) -> list[str]:
        """The command line."""
        program = (sys.executable, "-m", "serving.offline")
        return [*program, str(self.model), str(self.answers_path)]

    def wait_answers(self, timeout: float = 240.0) -> Answers:
        """Wait for the process to end, and read the answers.

        Raises:
            RuntimeError: It failed; the message ends with the last lines of the log.
        """
        if self.process.wait(timeout):
            tail = "\n".join(self.log_text().splitlines()[-40:])
            raise RuntimeError(f"The {self.variant} run failed. Its log ends:\n{tail}")
        found = json.loads(self.answers_path.read_text())
        alone = [[Completion(**run) for run in runs] for runs in found["alone"]]
        return Answers(alone=alone, control=Completion(**found["control"]))


def _completion(output) -> Completion:
    answer = output.outputs[0]
    found = Completion(status=200, token_ids=list(answer.token_ids))
    for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        found.logprobs.append(logprobs[token].logprob)
        found.gaps.append(gap(logprob.logprob for logprob in logprobs.values()))
    tokens = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    found.prompt_logprobs = [p[token].logprob for token, p in tokens if p is not None]
    return found


def main(model: str, answers_path: str) -> None:
    """Ask each prompt alone, then all at once, and write the answers."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2**32,
        enable_prefix_caching=False,
        seed=0,
    )
    params = SamplingParams(
        max_tokens=GENERATED,
        temperature=0,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
        detokenize=False,
    )

    def ask(*prompts: list[int]) -> list[Completion]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        return [_completion(output) for output in outputs]

    prompts = [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    answers = Answers(alone=[sum((ask(p) for _ in range(RUNS)), []) for p in prompts])
    for runs, crowded in zip(answers.alone, ask(*prompts), strict=True):
        runs.append(crowded)
    (answers.control,) = ask(control_prompt(prompts[-1]))
    Path(answers_path).write_text(json.dumps(asdict(answers)))


if __name__ == "__main__":
    main(*sys.argv[1:])

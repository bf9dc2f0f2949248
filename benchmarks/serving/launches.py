# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of ``vllm serve`` as people use them: what each passes, and what it needs.

A row changes what it is about and leaves the rest as vLLM has it, CUDA graphs and
compilation among it. ``docs/launches.md`` has the same rows, and what was seen of them.
"""

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from serving import request_sets, scenario
from serving.scenario import Answers
from serving.server import NO_COMPILE, Server

# One dense layer and two of experts, three layers on two indexers, an MTP layer.
MODEL = "tiny-moe"
# One API server, as elsewhere: each has counters of its own.
_DP2 = (
    *("--data-parallel-size", "2", "--enable-expert-parallel"),
    *("--api-server-count", "1"),
)
_SM100_PREFILL = "vLLM 0.33.0 has this MLA prefill backend on SM100 alone"


@dataclass(frozen=True)
class Launch:
    """A row."""

    name: str  # what a test of it is called
    args: tuple[str, ...] = ()  # passed to ``vllm serve``
    env: Mapping[str, str] = field(default_factory=dict)  # set for it
    token_budget: int = scenario.TOKEN_BUDGET  # tokens of a scheduler step
    max_num_seqs: int = 16  # most requests in a step
    gpus: int = 1  # of one host
    never: str = ""  # why no SM90 GPU can run it; empty if one can
    package: str = ""  # that must be installed beside vLLM's own requirements
    masked: bool = True  # whether prefills take masked MHA under the opt-in
    model: str = MODEL  # a name of ``tiny_model.SPECS``
    text: bool = False  # whether the server has a tokenizer; the others take ids alone
    # Puts requests to a server.
    ask: Callable[[Server], Awaitable[Answers]] = scenario.ask_server

    def server_arguments(self) -> dict:
        """Fields of ``Server``."""
        return dict(
            extra_args=self.args,
            max_model_len=scenario.MAX_MODEL_LEN,
            max_num_batched_tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            tokenizer=self.text,
            several_gpus=self.gpus > 1,
        )


def _mtp(tokens: int) -> tuple[str, str]:
    config = {"method": "mtp", "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps(config)


def _prefill_backend(name: str) -> tuple[str, str]:
    return "--attention-config", json.dumps({"mla_prefill_backend": name})


def _many(piece: int, budget: int, *, masked: bool) -> Launch:
    return Launch(
        f"long-prefill-{piece}",
        # Graphs of batches of up to 256 requests would take longest of all.
        (*NO_COMPILE, "--long-prefill-token-threshold", str(piece)),
        token_budget=budget,
        max_num_seqs=request_sets.MANY,
        masked=masked,
        ask=request_sets.ask_many,
    )


LAUNCHES = (
    Launch("defaults"),
    Launch("enforce-eager", ("--enforce-eager",)),
    Launch("mtp-1", _mtp(1)),
    Launch("mtp-3", _mtp(3)),
    Launch("index-topk-1024", ("--hf-overrides", json.dumps({"index_topk": 1024}))),
    # Up to 256 tokens the backend counts a piece as decodes, so none is masked.
    _many(128, 256 * 128, masked=False),
    _many(301, 8192, masked=True),
    *(Launch(f"budget-{size}", token_budget=size) for size in (1024, 2048, 2049)),
    Launch(
        "batch-invariant",
        env={"VLLM_BATCH_INVARIANT": "1"},
        never="vLLM 0.33.0 refuses: none of its sparse MLA backends is batch-invariant",
    ),
    Launch("prompt-logprobs", ask=request_sets.ask_prompt_logprobs),
    Launch("text", text=True, ask=request_sets.ask_text),
    Launch("glm5", model="tiny-glm5"),
    Launch("glm5-mtp-3", _mtp(3), model="tiny-glm5"),
    Launch("glm5-flash", model="tiny-glm5-flash"),
    Launch("prefill-flash-attn", _prefill_backend("FLASH_ATTN")),
    Launch("prefill-flashinfer", _prefill_backend("FLASHINFER"), never=_SM100_PREFILL),
    Launch(
        "prefill-trtllm-ragged",
        _prefill_backend("TRTLLM_RAGGED"),
        never=_SM100_PREFILL,
    ),
    Launch("tp2", ("--tensor-parallel-size", "2"), gpus=2),
    Launch("dp2-ep", _DP2, gpus=2),
    Launch(
        "dbo",
        # vLLM refuses it with the all-to-all that it has by itself.
        (*_DP2, "--enable-dbo", "--all2all-backend", "deepep_low_latency"),
        gpus=2,
        package="deep_ep",
    ),
    Launch(
        "pcp2",
        ("--prefill-context-parallel-size", "2"),
        gpus=2,
        ask=functools.partial(
            scenario.ask_server, lengths=(1, 2, 3, 64, 700, 1533, 4001, 4097)
        ),
    ),
    Launch(
        "dcp2",
        ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"),
        gpus=2,
        masked=False,
    ),
)

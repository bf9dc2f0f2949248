# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start-up compiles what serving calls, and nothing else: FA4's own keys say so.

``warmup_keys`` asks them, in subprocesses of one target each; no kernel is compiled.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from vllm_sparse_mla.codegen.worker import environment

pytestmark = [pytest.mark.codegen, pytest.mark.timeout(3600)]


SERVERS = {
    **{
        f"{model}-topk{topk}": dict(model=model, topk=topk)
        # With few keys to a query, shorter prompts go beyond them.
        for model in ("deepseek", "glm", "glm-flash")
        for topk in (2048, 32)
    },
    # Masked MHA without a context alone.
    "glm-one-rank": dict(model="glm", tensor_parallel_size=1),
    "glm-one-request": dict(model="glm", max_num_seqs=1),
    "glm-steps-of-8192": dict(model="glm", max_num_batched_tokens=8192),
}
# Wrong bodies of ``FA4MaskedMHAKernel.compile``, by their names in ``warmup_keys``.
SABOTAGE = (
    "without_lse",
    "never_causal",
    "always_dense",
    "without_key_starts",
    "another_request_count",
)


SABOTAGED = ("deepseek-topk2048", "glm-topk2048", "glm-flash-topk2048")
# `make test` asks for one server; the others' answers take minutes, and `make
# test-codegen`.
IN_MAKE_TEST = ("sm_90a", "deepseek-topk2048")


def cases(servers: Iterable[str]) -> list:
    """Parameters of a test: a target and a server."""
    return [
        pytest.param(
            *case,
            marks=() if case == IN_MAKE_TEST else pytest.mark.extra,
            id="-".join(case),
        )
        for case in itertools.product(("sm_90a", "sm_100a"), servers)
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Callable[[str, str], dict]:
    """Returns what ``warmup_keys`` answers for a target and a server."""

    @functools.cache
    def ask(target: str, servers: tuple[str, ...]) -> dict[str, dict]:
        env = os.environ | environment(target, tmp_path_factory.mktemp("dump"))
        env.pop("TRITON_INTERPRET", None)
        tables = {name: SERVERS[name] for name in servers}, SABOTAGE, SABOTAGED
        run = subprocess.run(
            [
                sys.executable,
                Path(__file__).with_name("warmup_keys.py"),
                target,
                *map(json.dumps, tables),
            ],
            env=env | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        return json.loads(run.stdout)

    def answer(target: str, server: str) -> dict:
        alone = (target, server) == IN_MAKE_TEST
        others = (name for name in SERVERS if (target, name) != IN_MAKE_TEST)
        return ask(target, (server,) if alone else tuple(others))[server]

    return answer


@pytest.mark.parametrize("target, server", cases(SERVERS))
def test_no_call_finds_its_kernel_missing(found, target, server):
    answer = found(target, server)
    assert answer["calls"] > 0
    assert not answer["missing"]


@pytest.mark.parametrize("target, server", cases(SERVERS))
def test_every_kernel_is_called(found, target, server):
    assert not found(target, server)["superfluous"]


@pytest.mark.parametrize("sabotage", SABOTAGE)
@pytest.mark.parametrize("target, server", cases(SABOTAGED))
def test_a_wrong_body_of_compile_is_found_out(found, target, server, sabotage):
    assert found(target, server)["sabotage"][sabotage] > 0

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start-up compiles what serving calls, and nothing else: FA4's own keys say so.

``warmup_keys`` asks them, in one subprocess for each target; no kernel is compiled.
"""

import json
import os
import subprocess
import sys
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


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def found(request, tmp_path_factory):
    env = os.environ | environment(request.param, tmp_path_factory.mktemp("dump"))
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("warmup_keys.py"),
            request.param,
            *map(json.dumps, (SERVERS, SABOTAGE, SABOTAGED)),
        ],
        env=env | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("server", SERVERS)
def test_no_call_finds_its_kernel_missing(found, server):
    assert found[server]["calls"] > 0
    assert not found[server]["missing"]


@pytest.mark.parametrize("server", SERVERS)
def test_every_kernel_is_called(found, server):
    assert not found[server]["superfluous"]


@pytest.mark.parametrize("sabotage", SABOTAGE)
@pytest.mark.parametrize("server", SABOTAGED)
def test_a_wrong_body_of_compile_is_found_out(found, server, sabotage):
    assert found[server]["sabotage"][sabotage] > 0

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FA4's masking of SM90 tiles, bit for bit, without a GPU: see the program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sm90_mask_on_host.py")


# Both tile widths, callbacks and places of the key start, each way that a row, a column
# or a head is found, and calls narrower than a word and wider than a group.
SAMPLE = (
    "dense-80",
    "offset-80",
    "reserved-word-128",
    "dense-causal-128",
    "few-queries-128",
    "two-heads-causal-128",
    "vec-2-80",
    "vec-256-80",
)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        pytest.param(SAMPLE, len(SAMPLE), id="sample", marks=pytest.mark.processes),
        pytest.param(
            ("--without", *SAMPLE),
            22 - len(SAMPLE),
            id="others",
            marks=pytest.mark.extra,
        ),
    ],
)
def test_every_thread_keeps_exactly_the_masks_keys_and_reads_no_other_storage(
    arguments, count
):
    target = {"CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90"}
    switches = {"VLLM_SPARSE_MLA_SM90": "1", "VLLM_SPARSE_MLA_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        env=os.environ | target | switches | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if "exact" in line]
    exact = {line["case"]: line["exact"] for line in lines}
    # A signal: the storage was left in the case after the last one.
    assert done.returncode == 0, (done.returncode, exact, done.stderr[-2000:])
    assert len(exact) == count and all(exact.values()), exact

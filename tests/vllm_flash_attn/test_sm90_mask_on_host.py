# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FA4's masking of SM90 tiles, bit for bit, without a GPU: see the program."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("sm90_mask_on_host.py")


def test_every_thread_keeps_exactly_the_masks_keys_and_reads_no_other_storage():
    target = {"CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90"}
    switches = {"VLLM_SPARSE_MLA_SM90": "1", "VLLM_SPARSE_MLA_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env=os.environ | target | switches | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if "exact" in line]
    exact = {line["case"]: line["exact"] for line in lines}
    # A signal: the storage was left in the case after the last one.
    assert done.returncode == 0, (done.returncode, exact, done.stderr[-2000:])
    assert len(exact) == 22 and all(exact.values()), exact

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FA4's mask module is overlaid only where the Hopper switch is set."""

import os
import subprocess
import sys

import pytest

SWITCH = "VLLM_SPARSE_MLA_SM90"


@pytest.mark.parametrize("switch", [None, "0", "1"])
def test_fa4s_mask_module_is_replaced_only_with_the_switch(switch):
    program = (
        "from vllm_sparse_mla.plugin import register\n"
        "from vllm_sparse_mla.overlay import active_finder\n"
        "register()\n"
        "spec = active_finder().find_spec('vllm.vllm_flash_attn.cute.mask', None)\n"
        "print('replaced' if spec else 'upstream')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != SWITCH}
    env["VLLM_SPARSE_MLA_STRICT"] = "1"
    if switch is not None:
        env[SWITCH] = switch
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = "replaced" if switch == "1" else "upstream"
    assert done.stdout.split()[-1] == expected

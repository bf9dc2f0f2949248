# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Mask words are loaded a block ahead, so another order of blocks must not compile."""

import os
import subprocess
import sys

PROGRAM = """
from vllm_sparse_mla.plugin import register
register()
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module
install_parent_module()
from vllm.vllm_flash_attn.cute.mask import AttentionMask

# What FA4 does under block sparsity: after the blocks that the callback masks come
# those that need no callback, from one and the same mask object.
mask = object.__new__(AttentionMask)
object.__setattr__(mask, "_words_ahead", None)
try:
    mask.apply_mask(*[None] * 6, mask_seqlen=False, mask_causal=False)
except NotImplementedError as error:
    print(error)
"""


def test_block_sparsity_with_a_packed_callback_is_refused():
    env = os.environ | {"VLLM_SPARSE_MLA_SM90": "1", "VLLM_SPARSE_MLA_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "does not support block sparsity" in done.stdout

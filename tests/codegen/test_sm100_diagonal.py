# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FA4's SM100 kernel without the diagonal below the diagonal, beside upstream's.

``tests/vllm_flash_attn/test_causal_mask_mod.py`` shows that it changes no result.
"""

from dataclasses import replace

import pytest

from vllm_sparse_mla.codegen import CodegenRecord, Variant

pytestmark = [pytest.mark.codegen, pytest.mark.timeout(3600)]

# Instructions of the softmax loop: with vLLM 0.33.0, nvidia-cutlass-dsl 4.8.0 and its
# ptxas 656 and 691 were seen, 918 and 954 in upstream's kernel, 483 unmasked.
LIMITS = dict.fromkeys(("dense", "stock_dense", "word32"), 660)
LIMITS |= dict.fromkeys(("offset", "stock_offset"), 700)


def test_loop_is_short(compiled, masked_causal):
    edited, stock = beside_upstreams(compiled, masked_causal)
    limit = LIMITS[masked_causal.callback]
    assert edited.loop_opcodes["LDG"] > 0
    assert edited.loop_instructions <= limit < stock.loop_instructions - 200


def test_nothing_else_is_worse(compiled, masked_causal):
    edited, stock = beside_upstreams(compiled, masked_causal)
    assert edited.mask_loads == stock.mask_loads
    assert edited.applications == stock.applications
    assert edited.registers <= stock.registers
    assert edited.local_bytes <= stock.local_bytes
    assert edited.local_opcodes <= stock.local_opcodes
    assert edited.instructions < stock.instructions


def test_other_kernels_do_not_change(compiled, unaffected):
    edited, stock = beside_upstreams(compiled, unaffected)
    assert edited.opcodes == stock.opcodes
    assert edited.loop_opcodes == stock.loop_opcodes
    assert edited.registers == stock.registers


def beside_upstreams(compiled, variant: Variant) -> tuple[CodegenRecord, CodegenRecord]:
    """The record of a variant and that of the same one in upstream's kernel."""
    return compiled[variant], compiled[replace(variant, stock_kernel=True)]

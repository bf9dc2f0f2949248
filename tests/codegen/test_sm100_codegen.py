# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the callbacks compile to inside FA4's SM100 kernels; no GPU needed.

The records are compiled once per session.
"""

from dataclasses import replace

import pytest

from vllm_sparse_mla.codegen import CodegenRecord, Variant

# The first test waits for all records, on a busy machine for many times as long.
pytestmark = [pytest.mark.codegen, pytest.mark.timeout(3600)]


def expected_loads(record: CodegenRecord) -> dict[int, int]:
    """Loads by width that a vectorised callback of this kind needs.

    The dense callback reads the four words of 128 keys at once. With an offset 128
    keys lie in two such groups, and the key start is one word more.
    """
    if "offset" in record.variant.callback:
        return {128: 2 * record.applications, 32: record.applications}
    return {128: record.applications}


def test_target_and_cubin(compiled, ours):
    record = compiled[ours]
    assert record.target == "sm_100a"
    assert record.cubin_bytes > 0
    assert record.instructions > 1000
    assert set(record.versions) == {
        "cutlass_dsl",
        "nvdisasm",
        "ptxas",
        "torch",
        "vllm",
    }


def test_exact_loads_per_application(compiled, ours):
    record = compiled[ours]
    assert record.mask_loads == expected_loads(record)


def test_ptx_asks_for_the_same_loads(compiled, ours):
    before = compiled[ours.unmasked].ptx_loads
    after = compiled[ours].ptx_loads
    added = {width: after[width] - before.get(width, 0) for width in after}
    assert {w: n for w, n in added.items() if n} == expected_loads(compiled[ours])


def test_stock_callbacks_fail_the_width_check(compiled, ours, stock_twin):
    record = compiled[stock_twin(ours)]
    assert record.mask_loads != expected_loads(record)
    assert 128 not in record.mask_loads


def test_no_costlier_than_the_stock_callback_of_its_kind(compiled, ours, stock_twin):
    record, reference = compiled[ours], compiled[stock_twin(ours)]
    assert record.instructions <= reference.instructions
    assert record.registers <= reference.registers
    assert record.local_bytes <= reference.local_bytes
    assert record.local_opcodes <= reference.local_opcodes


# Seen with vLLM 0.33.0: with and without the check for the end of the keys, once more
# at the diagonal; the 256/256 kernel has one piece of code for all.
APPLICATIONS = {(192, False): 2, (192, True): 3, (256, False): 1, (256, True): 1}


def test_applications_seen_in_the_trace_are_in_the_code(compiled, one_word):
    """Three counts of the applications that do not rest on each other.

    FA4's mask function is counted as it is traced; the callback's calls are, and one
    application covers 128 keys; and in SASS a callback that loads one word a call
    needs four loads an application.
    """
    record = compiled[one_word]
    assert record.mask_calls * record.vec_size == 128 * record.applications
    assert record.mask_loads == {32: 4 * record.applications}
    assert record.applications == APPLICATIONS[one_word.head_dim, one_word.causal]


def test_every_callback_is_applied_as_often_as_one_word_a_call(compiled, ours):
    words = Variant(ours.head_dim, ours.head_dim_v, ours.causal, callback="word32")
    assert compiled[ours].applications == compiled[words].applications
    assert compiled[ours].mask_calls == compiled[ours].applications


def test_key_starts_cost_no_more_than_the_reserved_word(compiled, with_key_starts):
    reserved = compiled[replace(with_key_starts, key_starts=False)]
    assert compiled[with_key_starts].instructions <= reserved.instructions


def test_code_does_not_depend_on_the_number_of_requests(compiled, three_requests):
    one, three = compiled[replace(three_requests, batch=1)], compiled[three_requests]
    assert one.opcodes == three.opcodes
    assert one.loop_opcodes == three.loop_opcodes
    assert one.registers == three.registers
    assert one.mask_loads == three.mask_loads


def test_slice_by_request_keeps_the_16_byte_load(compiled):
    whole = compiled[Variant(batch=3, callback="dense")]
    sliced = compiled[Variant(batch=3, callback="dense", sliced=True)]
    assert sliced.mask_loads == expected_loads(sliced)
    assert sliced.opcodes == whole.opcodes


def test_callback_alone(compiled):
    """The compile-only half of the kernel that ``test_callback_words`` runs."""
    for callback, key_starts in (("dense", False), ("offset", False), ("offset", True)):
        record = compiled[Variant(callback=callback, key_starts=key_starts, alone=True)]
        assert record.mask_loads == expected_loads(record)
        assert record.local_opcodes == 0
    for callback in ("stock_dense", "stock_offset"):
        assert 128 not in compiled[Variant(callback=callback, alone=True)].mask_loads

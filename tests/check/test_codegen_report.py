# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The verdicts on compiled callbacks, on records made by hand."""

import pytest

from vllm_sparse_mla.check.codegen_report import ARCH, judge_record
from vllm_sparse_mla.codegen import CodegenRecord, Variant


def _record(callback: str, mask_loads: dict[int, int], **changed) -> CodegenRecord:
    values = dict(
        variant=Variant(callback=callback, arch=ARCH),
        kernel="kernel",
        target=ARCH,
        cubin_bytes=1,
        instructions=100,
        opcodes={},
        loop_opcodes={},
        global_loads={},
        registers=128,
        local_bytes=0,
        local_opcodes=0,
        ptx_loads={},
        applications=2,
        mask_calls=2,
        vec_size=128,
        versions={},
        seconds=1.0,
        mask_loads=mask_loads,
    )
    return CodegenRecord(**values | changed)


@pytest.mark.parametrize(
    "callback, loads",
    [("dense", {128: 2}), ("offset", {128: 4, 32: 2}), ("offset", {128: 4})],
)
def test_real_16_byte_loads_hold(callback, loads):
    result = judge_record(_record(callback, loads))
    assert result.ok and result.judged
    assert result.loads == (loads[128], loads.get(32, 0))


@pytest.mark.parametrize(
    "callback, loads, changed, problem",
    [
        ("dense", {32: 8}, {}, "0 128-bit loads, 2 expected"),
        ("dense", {128: 2, 32: 1}, {}, "1 32-bit loads, at most 0"),
        ("dense", {128: 2, 64: 1}, {}, "other widths"),
        ("dense", {128: 4}, {}, "4 128-bit loads, 2 expected"),
        ("dense", {}, {"applications": 0}, "does not apply the mask"),
        ("dense", {128: 2}, {"target": "sm_90a"}, "built for sm_90a"),
        ("offset", {128: 4, 32: 3}, {}, "3 32-bit loads, at most 2"),
        ("offset", {32: 10}, {}, "0 128-bit loads, 4 expected"),
    ],
)
def test_anything_else_fails(callback, loads, changed, problem):
    result = judge_record(_record(callback, loads, **changed))
    assert not result.ok
    assert problem in result.problem


def test_stock_callbacks_are_reported_and_not_judged():
    result = judge_record(_record("stock_dense", {32: 8}))
    assert result.ok and not result.judged
    assert result.loads == (0, 8)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The instrument itself: what it refuses, reads and reports."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_sparse_mla.cli import app
from vllm_sparse_mla.codegen import (
    CodegenError,
    CodegenRecord,
    DisassemblerMissing,
    Variant,
    compile_variants,
    disassembly,
)
from vllm_sparse_mla.codegen.latest_fa4 import ignored_causal
from vllm_sparse_mla.codegen.table import show_records


def make_record(variant: Variant, loads: dict[int, int], **counts) -> CodegenRecord:
    return CodegenRecord(
        variant=variant,
        kernel="kernel",
        target="sm_100a",
        cubin_bytes=1,
        instructions=sum(counts.values()),
        opcodes=counts,
        loop_opcodes=counts,
        global_loads=loads,
        registers=128,
        local_bytes=0,
        local_opcodes=0,
        ptx_loads=loads,
        applications=2,
        mask_calls=2,
        vec_size=128,
        versions={"vllm": "0"},
        seconds=1.0,
    )


UNMASKED = make_record(Variant(), {32: 27}, FADD=10, LDG=27)
MASKED = make_record(Variant(callback="dense"), {32: 27, 128: 2}, FADD=9, LDG=29, SEL=4)


@pytest.mark.parametrize(
    "opcode, width",
    [
        ("E", 32),
        ("E.CONSTANT", 32),
        ("E.64", 64),
        ("E.128.CONSTANT", 128),
        ("E.ENL2.256", 256),
        ("E.U8", 8),
        ("E.S16", 16),
    ],
)
def test_width_of_a_sass_load(opcode, width):
    assert disassembly.load_width(opcode.split(".")) == width


def test_width_of_ptx_loads():
    text = """
    ld.global.b32 %r1, [%rd1];
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    ld.global.nc.L1::evict_last.v2.u64 {%rd2, %rd3}, [%rd1];
    ld.relaxed.gpu.global.u32 %r1, [%rd1];
    ld.shared.b32 %r1, [%r2];
    st.global.b32 [%rd1], %r1;
    """
    assert disassembly.read_ptx_loads(text) == {32: 2, 128: 2}


def test_what_the_mask_adds():
    record = MASKED.against(UNMASKED)
    assert record.mask_loads == {128: 2}
    assert record.added_instructions == 5
    assert record.added_opcodes == {"FADD": -1, "LDG": 2, "SEL": 4}


def test_record_survives_json():
    record = MASKED.against(UNMASKED)
    assert CodegenRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_table_in_a_pipe_is_plain_text():
    out = io.StringIO()
    show_records([MASKED.against(UNMASKED)], Console(file=out, width=200))
    _, heading, _, row, _, versions = out.getvalue().splitlines()
    assert heading.startswith("| variant")
    assert row.startswith("| 192/128 full lse b1 dense")
    assert "2x128" in row and "+5" in row
    assert versions == "vllm 0"


@pytest.mark.parametrize(
    "values, message",
    [
        ({"head_dim": 128}, r"head_dim, head_dim_v must be one of .*got \(128, 128\)"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"callback": "fast"}, "callback must be one of .*got 'fast'"),
        ({"arch": "hopper"}, "arch must look like sm_100a .*got 'hopper'"),
    ],
)
def test_variant_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        Variant(**values)


def test_command_refuses_an_unknown_target():
    result = CliRunner().invoke(app, ["codegen", "--arch", "sm_1"])
    assert result.exit_code == 2
    assert "sm_100a" in result.output


@pytest.mark.parametrize("ci", ["true", ""])
def test_missing_disassembler(monkeypatch, require_disassembler, ci):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(disassembly.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DisassemblerMissing, match="install the triton"):
        disassembly.find_tool("nvdisasm")
    outcome = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(outcome, match="nvdisasm not found"):
        require_disassembler()


@pytest.mark.codegen
def test_failure_names_the_variant_and_the_reason(require_disassembler, tmp_path):
    require_disassembler()
    file = tmp_path / "empty.py"
    file.write_text("")
    variant = Variant(callback=f"{file}:mask_mod", alone=True)
    with pytest.raises(CodegenError, match=r"alone empty.py:mask_mod .*got 'mask_mod'"):
        compile_variants([variant])


def test_ignored_causal_is_found():
    causal = Variant(causal=True, callback="dense")
    same = make_record(causal, {}, **MASKED.opcodes)
    assert ignored_causal([UNMASKED, MASKED, same]) == [causal]
    other = make_record(causal, {}, FADD=1)
    assert ignored_causal([UNMASKED, MASKED, other]) == []

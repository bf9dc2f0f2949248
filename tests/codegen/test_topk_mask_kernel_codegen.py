# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the top-k mask kernel compiles to for Hopper and Blackwell; no GPU needed.

Counts beside the bounds were seen with nvidia-cutlass-dsl 4.8.0 and the ptxas inside.
"""

import json
import re
import subprocess
from collections import Counter

import pytest

from vllm_sparse_mla.codegen.disassembly import find_tool, read_cubin

pytestmark = pytest.mark.codegen

REGISTERS_PER_SM = 65536
# Whether rows are read 16 bytes at a time.
KEYS = {True: "vectorized", False: "scalar"}


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def target(request, other_kernels):
    """Target, tuning, and per key what `read_cubin` says and the full opcodes."""
    folder = other_kernels(request.param)
    paths = {key: folder / f"topk_mask-{name}.cubin" for key, name in KEYS.items()}
    tuning = json.loads((folder / "topk_mask.json").read_text())
    found = {key: (read_cubin(path), full_opcodes(path)) for key, path in paths.items()}
    return request.param, tuning, found


def full_opcodes(path):
    """Opcodes with their modifiers, such as `STG.E.128`, counted."""
    listing = subprocess.run(
        [find_tool("nvdisasm"), "-json", path], capture_output=True, check=True
    )
    _, functions = json.loads(listing.stdout)
    return Counter(
        instruction["opcode"]
        for function in functions
        for instruction in function["sass-instructions"]
    )


def count(opcodes, pattern):
    return sum(n for name, n in opcodes.items() if re.fullmatch(pattern, name))


def test_every_key_compiles_for_the_target_without_local_memory(target):
    arch, _, found = target
    for key, (cubin, _) in found.items():
        assert cubin.target == arch, key
        assert cubin.local_opcodes == 0, key
        assert cubin.local_bytes == 0, key


def test_registers_leave_room_for_the_planned_blocks(target):
    _, tuning, found = target
    for key, (cubin, _) in found.items():
        # Registers are given out by 8: 56 to 59 for sm_90a, 56 for sm_100a.
        registers = -(-cubin.registers // 8) * 8
        block = registers * tuning["threads"]
        assert block * tuning["blocks_per_sm"] <= REGISTERS_PER_SM, key


def test_rows_are_read_16_bytes_at_a_time_where_aligned(target):
    _, tuning, found = target
    for vectorized, (cubin, _) in found.items():
        wide = cubin.global_loads.get(128, 0)
        # Three places load a chunk: the first row, the next row, further chunks.
        assert wide == (3 * tuning["vectors"] if vectorized else 0)


def test_the_check_of_wide_loads_refuses_scalar_loads(target):
    # The negative control: the scalar program reads the same rows word by word.
    _, _, found = target
    scalar, _ = found[False]
    vectorized, _ = found[True]
    assert scalar.global_loads[32] > vectorized.global_loads[32]
    assert 128 not in scalar.global_loads


def test_the_mask_is_written_only_by_16_byte_stores(target):
    _, _, found = target
    for key, (_, opcodes) in found.items():
        assert count(opcodes, r"STG\.E\.128") > 0, key
        assert count(opcodes, r"STG.*") == count(opcodes, r"STG\.E\.128"), key


def test_bits_meet_in_shared_memory_between_barriers(target):
    _, _, found = target
    for key, (_, opcodes) in found.items():
        assert count(opcodes, r"ATOMS\.OR.*") > 0, key
        assert count(opcodes, r"(ATOM|ATOMG|RED|REDG)\b.*") == 0, key
        # After clearing, after scattering, after writing.
        assert count(opcodes, r"BAR\.SYNC.*") == 3, key


def test_code_stays_small(target):
    # 886 and 964 for sm_90a, 980 and 1079 for sm_100a.
    _, _, found = target
    for key, (cubin, _) in found.items():
        assert cubin.instructions <= 1400, key

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM's CuTe DSL ``fused_q`` compiles to for Hopper; no GPU needed.

Counts beside the bounds were seen with nvidia-cutlass-dsl 4.8.0 and the ptxas inside.
"""

import re

import pytest

from vllm_sparse_mla.codegen.disassembly import read_cubin

pytestmark = pytest.mark.codegen

THREADS_PER_SM, REGISTERS_PER_SM = 2048, 65536


@pytest.fixture(scope="module")
def compiled(other_kernels):
    """Returns a function: what the cubin of a key holds, and the threads of a block."""
    folder = other_kernels("sm_90a")

    def read(key: str):
        ptx = (folder / f"fused_q-{key}.ptx").read_text()
        (threads,) = re.findall(r"\.reqntid (\d+)", ptx)
        return read_cubin(folder / f"fused_q-{key}.cubin"), int(threads)

    return read


def test_it_compiles_and_fills_an_sm(compiled, fused_q_key):
    cubin, threads = compiled(fused_q_key)
    assert cubin.target == "sm_90a"
    assert cubin.local_opcodes == cubin.local_bytes == 0
    # 18 to 32: as many threads as an SM holds.
    registers = -(-cubin.registers // 8) * 8
    assert registers * THREADS_PER_SM <= REGISTERS_PER_SM
    assert THREADS_PER_SM % threads == 0


def test_blocks_are_large(compiled, fused_q_key):
    _, threads = compiled(fused_q_key)
    assert threads == 256


def test_bf16_queries_move_16_bytes_a_thread(compiled):
    """Upstream's blocks and loads are small: what this is for."""
    stock, threads = compiled("stock-128-64-False-False")
    assert threads == 128
    ours, _ = compiled("128-64-False-False")
    assert ours.global_loads[128] == stock.global_loads.get(128, 0) + 1
    assert ours.global_loads.get(32, 0) < stock.global_loads[32]

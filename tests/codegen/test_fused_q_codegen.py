# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM's CuTe DSL ``fused_q`` compiles to for Hopper; no GPU needed.

Counts beside the bounds were seen with nvidia-cutlass-dsl 4.8.0 and the ptxas inside.
"""

import itertools
import json
import re

import pytest

from vllm_sparse_mla.codegen.disassembly import read_cubin

pytestmark = pytest.mark.codegen

THREADS_PER_SM, REGISTERS_PER_SM = 2048, 65536
# Heads of a rank, of the indexer, their RoPE layout, and whether queries are fp8.
KEYS = [
    *itertools.product((8, 128), (64,), (False,), (False, True)),
    *itertools.product((64,), (32,), (True,), (False, True)),
    *itertools.product((128,), (0,), (False,), (False, True)),
]
STOCK = (128, 64, False, False)

# One process per target, which the DSL latches at its first import. The DSL names its
# dump after argument types, so each is moved away.
COMPILE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from cutlass import BFloat16
from vllm_sparse_mla.plugin import register
from vllm_sparse_mla.testing.stock import load_stock_module
register()
from vllm.models.deepseek_v32.nvidia.ops import fused_q_cutedsl as module
from vllm.models.deepseek_v32.nvidia.ops import fused_q_sm90
sm90 = SimpleNamespace(has_device_capability=lambda x: x <= 90)
module.current_platform = fused_q_sm90.current_platform = sm90
none = 0, 0, None, None
dump, keys = Path(sys.argv[1]), json.loads(sys.argv[2])
for number, (stock, heads, index_heads, interleaved, quantized) in enumerate(keys):
    used = load_stock_module(module.__name__) if stock else module
    index = (128, index_heads, BFloat16, BFloat16) if index_heads else none
    used.FusedQKernel.compile(
        64, 512 if quantized else 0, heads, BFloat16, *index, interleaved
    )
    for kind in ("cubin", "ptx"):
        (found,) = dump.glob(f"*.{kind}")
        found.rename(dump.parent / f"{number}.{kind}")
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, run_for_target):
    """Per key, with whether it is stock's, the cubin and the threads of a block."""
    folder = tmp_path_factory.mktemp("sm_90a")
    keys = [(False, *key) for key in KEYS] + [(True, *STOCK)]
    dump = str(folder / "dump")
    run_for_target(folder, "sm_90a", COMPILE, dump, json.dumps(keys))
    found = {}
    for number, key in enumerate(keys):
        ptx = (folder / f"{number}.ptx").read_text()
        (threads,) = re.findall(r"\.reqntid (\d+)", ptx)
        found[key] = read_cubin(folder / f"{number}.cubin"), int(threads)
    return found


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_it_compiles_and_fills_an_sm(compiled, key):
    cubin, threads = compiled[False, *key]
    assert cubin.target == "sm_90a"
    assert cubin.local_opcodes == cubin.local_bytes == 0
    # 18 to 32: as many threads as an SM holds.
    registers = -(-cubin.registers // 8) * 8
    assert registers * THREADS_PER_SM <= REGISTERS_PER_SM
    assert THREADS_PER_SM % threads == 0


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_blocks_are_large(compiled, key):
    _, threads = compiled[False, *key]
    assert threads == 256


def test_bf16_queries_move_16_bytes_a_thread(compiled):
    """Upstream's blocks and loads are small: what this is for."""
    stock, threads = compiled[True, *STOCK]
    assert threads == 128
    ours, _ = compiled[False, *STOCK]
    assert ours.global_loads[128] == stock.global_loads.get(128, 0) + 1
    assert ours.global_loads.get(32, 0) < stock.global_loads[32]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Order of stores, barriers and atomics in the PTX of both mask kernels; no GPU needed.

What goes wrong without them shows on a GPU alone, and not always there.
"""

import json
import re

import pytest

pytestmark = pytest.mark.codegen

CLEARING = r"st\.global\S*\s+\[.*\],\s*\{.*\}"
ZEROS = r"st\.global\.v4\.b32\s+\[.*\],\s*\{0, 0, 0, 0\}"
BARRIER = r"bar\.sync"
SETTING = r"atom\.global\S*\.or\.b32"

COMPILE = """
import json, sys
from pathlib import Path
from vllm_sparse_mla.plugin import register
register()
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.model_executor.kernels.attention.dsa import topk_mask, topk_mask_cutedsl
dump, capability = Path(sys.argv[1]), int(sys.argv[2])
kernel = topk_mask._scatter_topk_kernel
constants = dict.fromkeys((n for n in kernel.arg_names if n.startswith("HAS_")), True)
constants["BLOCK"] = topk_mask._SCATTER_BLOCK
signature = {
    name: "constexpr" if name in constants
    else "*i32" if name.endswith("_ptr")
    else "i64" if name.endswith("_stride")
    else "i32"
    for name in kernel.arg_names
}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
owner = topk_mask_cutedsl.TopkMaskKernel()
owner.compile(owner.CompileKey(vectorized=True))
(cute,) = dump.glob("*.ptx")
print(json.dumps({"triton": compiled.asm["ptx"], "cute": cute.read_text()}))
"""


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def ptx(request, tmp_path_factory, run_for_target):
    """PTX of each kernel for one target."""
    folder = tmp_path_factory.mktemp(request.param)
    capability = re.search(r"\d+", request.param)[0]
    dump = str(folder / "dump")
    output = run_for_target(folder, request.param, COMPILE, dump, capability)
    return json.loads(output.splitlines()[-1])


def test_tritons_kernel_clears_then_waits_then_sets(ptx):
    pattern = f"({CLEARING})|({BARRIER})|({SETTING})"
    kinds = [match.lastindex for match in re.finditer(pattern, ptx["triton"])]
    assert kinds.count(2) == 1
    assert kinds == sorted(kinds) and set(kinds) == {1, 2, 3}


def test_the_cute_kernel_ends_with_clearing_the_rows_past_a_requests_length(ptx):
    *_, end = re.split(BARRIER, ptx["cute"])
    assert re.search(ZEROS, end)
    # The others write what was put together in shared memory.
    assert len(re.findall(ZEROS, ptx["cute"])) == len(re.findall(ZEROS, end))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Width of the loads and stores that make K, in PTX; no GPU needed."""

import json
import re

import pytest

pytestmark = pytest.mark.codegen

ACCESS = r"\b(?:ld|st)\.(?:global|local)\S*"

# The key's own inputs, as start-up has them, are what the signature is made of.
COMPILE = """
import json, sys
from vllm_sparse_mla.plugin import register
register()
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.model_executor.kernels.attention.dsa.concat_mla_k import CONCAT_MLA_K_KERNEL
kernel = CONCAT_MLA_K_KERNEL.kernel
heads, nope, rope, v, capability = map(int, sys.argv[1:])
key = CONCAT_MLA_K_KERNEL.CompileKey(heads, nope, rope, v, torch.bfloat16)
taken = {}
CONCAT_MLA_K_KERNEL.launch = lambda spec, inputs: taken.update(spec=spec, inputs=inputs)
CONCAT_MLA_K_KERNEL.compile(key)
_, given = taken["spec"]
inputs = taken["inputs"]
given |= CONCAT_MLA_K_KERNEL._prepare_launch_kwargs(
    tuple(inputs), tuple(inputs.values()), dict(given)
)
constants = {name: value for name, value in given.items() if name.isupper()}
signature = {
    name: "constexpr" if name in constants
    else "*bf16" if name.endswith("_ptr")
    else "i32"
    for name in kernel.arg_names
}
divisible = {
    (i,): [["tt.divisibility", 16]]
    for i, name in enumerate(kernel.arg_names)
    if name.endswith("_ptr") or "_stride" in name and given[name] % 16 == 0
}
source = ASTSource(
    fn=kernel, signature=signature, constexprs=constants, attrs=divisible
)
compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
print(json.dumps(compiled.asm["ptx"]))
"""


@pytest.mark.parametrize("capability", [90, 100], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "dims",
    [(16, 128, 64, 128), (128, 128, 64, 128), (64, 192, 64, 256)],
    ids=["deepseek-16h", "deepseek-128h", "glm-64h"],
)
def test_every_access_is_16_bytes_wide(tmp_path, run_for_target, dims, capability):
    arguments = (*map(str, dims), str(capability))
    output = run_for_target(tmp_path, f"sm_{capability}a", COMPILE, *arguments)
    ptx = json.loads(output.splitlines()[-1])
    assert f".target sm_{capability}" in ptx
    assert ".entry _concat_mla_k_kernel(" in ptx
    accesses = re.findall(ACCESS, ptx)
    assert set(accesses) == {"ld.global.v4.b32", "st.global.v4.b32"}

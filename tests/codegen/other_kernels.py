# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Program: compiles the kernels that are not FA4's for a target, into a folder.

Arguments are the target, the folder and, as JSON, the dimensions of K and the keys of
``fused_q``. The DSL latches its target at its first import: a process has one.
"""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from cutlass import BFloat16
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_sparse_mla.plugin import register
from vllm_sparse_mla.testing.stock import load_stock_module

register()

from vllm.model_executor.kernels.attention.dsa import (  # noqa: E402
    topk_mask,
    topk_mask_cutedsl,
)
from vllm.model_executor.kernels.attention.dsa.concat_mla_k import (  # noqa: E402
    CONCAT_MLA_K_KERNEL,
)
from vllm.models.deepseek_v32.nvidia.ops import (  # noqa: E402
    fused_q_cutedsl,
    fused_q_sm90,
)

DUMP = Path(os.environ["CUTE_DSL_DUMP_DIR"])
TARGET, FOLDER = sys.argv[1], Path(sys.argv[2])
CAPABILITY = int(re.search(r"\d+", TARGET)[0])


def keep(name: str) -> None:
    """Move what the DSL dumped, which it names after argument types alone."""
    for kind in ("cubin", "ptx"):
        (found,) = DUMP.glob(f"*.{kind}")
        found.rename(FOLDER / f"{name}.{kind}")


def compile_triton(name: str, kernel, constants: dict, types: dict, attrs=None) -> None:
    """Compile a kernel whose other arguments are of type i32."""
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg.rsplit("_")[-1], "i32")
        for arg in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants, attrs or {})
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32))
    (FOLDER / f"{name}.ptx").write_text(compiled.asm["ptx"])


def compile_topk_mask() -> None:
    kernel = topk_mask._scatter_topk_kernel
    flags = [name for name in kernel.arg_names if name.startswith("HAS_")]
    constants = dict.fromkeys(flags, True) | {"BLOCK": topk_mask._SCATTER_BLOCK}
    compile_triton(
        "topk_mask-triton", kernel, constants, {"ptr": "*i32", "stride": "i64"}
    )
    owner = topk_mask_cutedsl.TopkMaskKernel()
    for vectorized in (True, False):
        owner.compile(owner.CompileKey(vectorized))
        keep(f"topk_mask-{'vectorized' if vectorized else 'scalar'}")
    names = ("threads", "blocks_per_sm", "vectors")
    tuning = {name: getattr(topk_mask_cutedsl, name.upper()) for name in names}
    (FOLDER / "topk_mask.json").write_text(json.dumps(tuning))


def compile_concat_mla_k(name: str, dims: list[int]) -> None:
    """The key's own inputs, as start-up has them, are what the signature is made of."""
    owner, taken = CONCAT_MLA_K_KERNEL, {}
    owner.launch = lambda spec, inputs: taken.update(spec=spec, inputs=inputs)
    owner.compile(owner.CompileKey(*dims, torch.bfloat16))
    (_, given), inputs = taken["spec"], taken["inputs"]
    given |= owner._prepare_launch_kwargs(
        tuple(inputs), tuple(inputs.values()), dict(given)
    )
    constants = {name: value for name, value in given.items() if name.isupper()}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(owner.kernel.arg_names)
        if arg.endswith("_ptr") or ("_stride" in arg and given[arg] % 16 == 0)
    }
    compile_triton(
        f"concat_mla_k-{name}", owner.kernel, constants, {"ptr": "*bf16"}, divisible
    )


def compile_fused_q(name: str, key: list, module) -> None:
    heads, index_heads, interleaved, quantized = key
    index = 0, 0, None, None
    if index_heads:
        index = 128, index_heads, BFloat16, BFloat16
    nope = 512 if quantized else 0
    module.FusedQKernel.compile(64, nope, heads, BFloat16, *index, interleaved)
    keep(f"fused_q-{name}")


def main() -> None:
    concat_mla_k, fused_q = map(json.loads, sys.argv[3:])
    compile_topk_mask()
    for name, dims in concat_mla_k.items():
        compile_concat_mla_k(name, dims)
    if TARGET == "sm_90a":
        sm90 = SimpleNamespace(has_device_capability=lambda least: least <= 90)
        fused_q_cutedsl.current_platform = fused_q_sm90.current_platform = sm90
        stock = load_stock_module(fused_q_cutedsl.__name__)
        for name, key in fused_q.items():
            is_stock = name.startswith("stock")
            compile_fused_q(name, key, stock if is_stock else fused_q_cutedsl)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the kernels of masked attention compile to; needs no GPU."""

from collections.abc import Sequence
from dataclasses import replace

from mask_cases import Case
from rich.console import Console

from vllm_sparse_mla.codegen import Variant, compile_variants
from vllm_sparse_mla.codegen.table import columns


def compiled_masks(cases: Sequence[Case], arch: str) -> list[dict]:
    """A row for each kernel that serves these cases, and each callback in it.

    ``loop`` are the SASS instructions of the softmax loop, which runs for each block
    of keys; the mask's loads from global memory are count x bits.
    """
    kernels = {case.kernel: case for case in cases}
    wanted = {}
    for kernel, case in kernels.items():
        kind = "offset" if case.offset else "dense"
        callbacks = {"unmasked": "none", "ours": kind}
        if arch.startswith("sm_100"):
            callbacks["stock"] = f"stock_{kind}"
        for name, callback in callbacks.items():
            wanted[kernel, name] = Variant(
                *case.dims, causal=case.causal, callback=callback
            )
        if case.causal and "stock" in callbacks:
            in_stock = replace(wanted[kernel, "stock"], stock_kernel=True)
            wanted[kernel, "stock, stock vLLM"] = in_stock
    with Console(stderr=True).status(f"compiling {len(wanted)} kernels for {arch}"):
        records = compile_variants(list(wanted.values()), arch)
    return [
        {"kernel": kernel, "target": record.target, "variant": name} | columns(record)
        for (kernel, name), record in zip(wanted, records)
    ]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Code generation checks: what FA4's kernels compile to, with no GPU present."""

from vllm_sparse_mla.codegen.compiler import CodegenError, compile_variants
from vllm_sparse_mla.codegen.disassembly import DisassemblerMissing
from vllm_sparse_mla.codegen.records import CodegenRecord
from vllm_sparse_mla.codegen.variants import (
    CALLBACKS,
    HEAD_DIMS,
    Variant,
    every_variant,
    short_list,
)

__all__ = [
    "CALLBACKS",
    "HEAD_DIMS",
    "CodegenError",
    "CodegenRecord",
    "DisassemblerMissing",
    "Variant",
    "compile_variants",
    "every_variant",
    "short_list",
]

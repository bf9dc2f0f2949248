# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which part of a prefill a kernel belongs to, by its name.

Names are a profiler's: demangled C++, Triton's functions, and what the CuTe DSL makes
of module, class and arguments.
"""

import re

# The first that matches counts, whatever the case of letters. A kernel of attention may
# name the top-k, one of the indexer a matrix product or a norm.
GROUPS = {
    "mask": r"_scatter_topk|TopkMaskProgram",
    "attention": (
        r"sparse_attn_fwd|sparse_fwd|flash_fwd|FlashAttn|flash_attncute|flash_mla"
        r"|merge_attn_states|prepare_varlen|fmha"
    ),
    "indexer": r"fused_q_|mqa_logits|indexer",
    "top-k": r"top_?k|index_remap",
    "KV cache": r"and_cache|gather_and|cp_gather|upconvert",
    "layout": r"CatArray|concat|direct_copy|Memcpy DtoD",
    "norms": r"norm|rotary|act_and_mul",
    "projections": r"nvjet|gemm|gemv|splitK|cutlass::Kernel",
}
OTHER = "other"
LONGEST_NAME = 100  # characters; templates fill more than a table holds
_PATTERNS = {
    group: re.compile(pattern, re.IGNORECASE) for group, pattern in GROUPS.items()
}


def group_of(kernel: str) -> str:
    """One of ``GROUPS``, or ``OTHER``."""
    for group, pattern in _PATTERNS.items():
        if pattern.search(kernel):
            return group
    return OTHER


def short_name(kernel: str) -> str:
    """The beginning of a name, without the return type."""
    return kernel.removeprefix("void ")[:LONGEST_NAME]

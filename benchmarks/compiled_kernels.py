# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What do the masked kernels compile to, for SM100 and SM90? Needs no GPU.

    python3 benchmarks/compiled_kernels.py

Writes the records that the pages of docs/results show, ``codegen-sm100.jsonl`` and
``codegen-sm90.jsonl``: FA4's kernels with every callback, with LSE and one request; for
SM90 also without LSE, for SM100 also stock's causal kernel and the callbacks alone.
"""

import json
from dataclasses import replace
from pathlib import Path

from vllm_sparse_mla.codegen import Variant, compile_variants
from vllm_sparse_mla.codegen.records import LONG
from vllm_sparse_mla.codegen.variants import (
    SM90_CALLBACKS,
    every_variant,
    runs_on_sm90,
    short_list,
)

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def sm100_variants() -> list[Variant]:
    """FA4's kernels, stock's causal 192/128 ones, and the callbacks alone."""
    kernels = short_list()
    causal = [v for v in kernels if v.causal and v.head_dim == 192]
    full = [v for v in kernels if not v.causal and v.head_dim == 192]
    return [
        *kernels,
        *(replace(variant, stock_kernel=True) for variant in causal),
        *(replace(variant, alone=True) for variant in full),
    ]


def sm90_variants() -> list[Variant]:
    """FA4's kernels with what SM90 runs: scalar callbacks, not causal, and ours."""
    variants = every_variant(SM90_CALLBACKS)
    return [v for v in variants if v.batch == 1 and runs_on_sm90(v)]


def main() -> None:
    """Compile, and write the records."""
    targets = {
        "sm100": ("sm_100a", sm100_variants()),
        "sm90": ("sm_90a", sm90_variants()),
    }
    for name, (arch, variants) in targets.items():
        lines = []
        for record in compile_variants(variants, arch):
            row = record.to_dict()
            kept = {k: v for k, v in row.items() if k not in LONG}
            lines.append(json.dumps(kept) + "\n")
        (RESULTS / f"codegen-{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()

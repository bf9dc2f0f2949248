# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles the masked kernels with the newest FA4 on PyPI: a look ahead, no gate."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import Distribution
from pathlib import Path

from vllm_sparse_mla.codegen.compiler import CodegenError, compile_variants
from vllm_sparse_mla.codegen.records import CodegenRecord
from vllm_sparse_mla.codegen.variants import Variant

PACKAGE = "flash-attn-4"


def check_latest_fa4(
    variants: Sequence[Variant],
    arch: str,
    jobs: int,
    report: Callable[[str], None],
) -> list[CodegenRecord]:
    """Download FA4's newest pre-release and compile ``variants`` with it.

    It goes to a temporary folder that is removed; the installed packages stay as they
    are, so FA4 runs on the DSL that vLLM pins. ``report`` is told what was found, and
    why something could not run, of which there are no records.
    """
    with tempfile.TemporaryDirectory(prefix="sparse-mla-fa4-") as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--pre"]
        command += ["--no-deps", "--target", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            report(f"could not install {PACKAGE}: {done.stderr.strip()}")
            return []
        (fa4,) = Distribution.discover(name=PACKAGE, path=[folder])
        report(f"{PACKAGE} {fa4.version}")
        try:
            records = compile_variants(variants, arch, jobs, fa4_dir=Path(folder))
        except CodegenError as error:
            report(str(error))
            return []
    for variant in ignored_causal(records):
        report(f"causal changes nothing in {variant.label}: this FA4 ignores it there")
    return records


def ignored_causal(records: Sequence[CodegenRecord]) -> list[Variant]:
    """Causal variants whose code is that of the same variant without causal."""
    opcodes = {record.variant: record.opcodes for record in records}
    return [
        variant
        for variant, found in opcodes.items()
        if variant.causal and opcodes.get(replace(variant, causal=False)) == found
    ]

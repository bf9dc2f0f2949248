# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles variants in parallel subprocesses."""

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from vllm_sparse_mla.codegen.disassembly import find_tool
from vllm_sparse_mla.codegen.records import CodegenRecord
from vllm_sparse_mla.codegen.variants import Variant, check_arch
from vllm_sparse_mla.codegen.worker import CodegenError, compile_in_worker, start_worker


def compile_variants(
    variants: Sequence[Variant],
    arch: str = "sm_100a",
    jobs: int = 2,
    progress: Callable[[CodegenRecord], None] | None = None,
    fa4_dir: Path | None = None,
) -> list[CodegenRecord]:
    """Compile each variant once, with no GPU, and report on its code.

    The unmasked kernel of each variant is compiled too, to tell which loads and
    instructions are the mask's. Processes are spawned: a script that calls this needs
    ``if __name__ == "__main__":``.

    Args:
        variants: what to compile. A variant without a target gets ``arch``.
        arch: target such as ``sm_100a``.
        jobs: subprocesses at a time.
        progress: called with each record as it comes.
        fa4_dir: folder that holds a ``flash_attn`` package to compile instead of the
            FA4 that vLLM vendors. For sm_90 vectorised callbacks need the patch in it.

    Raises:
        DisassemblerMissing: if Triton's disassembler is not installed.
        CodegenError: if a variant does not compile.
    """
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)
    check_arch(arch)
    wanted = [v if v.arch else replace(v, arch=arch) for v in variants]
    todo = dict.fromkeys(x for v in wanted for x in (v.unmasked, v))
    done: dict[Variant, CodegenRecord] = {}
    # The DSL latches its target when it is first imported: processes of its own.
    for target in dict.fromkeys(variant.arch for variant in todo):
        chosen = [variant for variant in todo if variant.arch == target]
        with tempfile.TemporaryDirectory(prefix="sparse-mla-codegen-") as folder:
            pool = ProcessPoolExecutor(
                min(jobs, len(chosen)),
                multiprocessing.get_context("spawn"),
                initializer=start_worker,
                initargs=(target, folder, fa4_dir),
            )
            try:
                for future in as_completed(
                    pool.submit(compile_in_worker, variant) for variant in chosen
                ):
                    record = future.result()
                    done[record.variant] = record
                    if progress is not None:
                        progress(record)
            except BrokenProcessPool as error:
                logs = [path.read_text()[-2000:] for path in Path(folder).glob("*.log")]
                raise CodegenError(
                    f"a worker for {target} ended:\n" + "\n".join(logs)
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)
    return [done[v].against(done[v.unmasked]) for v in wanted]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles variants in parallel subprocesses."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from vllm_sparse_mla.codegen.disassembly import find_tool
from vllm_sparse_mla.codegen.records import CodegenRecord
from vllm_sparse_mla.codegen.variants import Variant, check_arch
from vllm_sparse_mla.codegen.worker import environment

_START = (
    "import sys; from vllm_sparse_mla.codegen.worker import main; main(sys.argv[1])"
)


class CodegenError(RuntimeError):
    """A variant did not compile, or its worker died."""


def compile_variants(
    variants: Sequence[Variant],
    arch: str = "sm_100a",
    jobs: int = 2,
    progress: Callable[[CodegenRecord], None] | None = None,
    fa4_dir: Path | None = None,
) -> list[CodegenRecord]:
    """Compile each variant once, with no GPU, and report on its code.

    The unmasked kernel of each variant is compiled too, to tell which loads and
    instructions are the mask's.

    Args:
        variants: what to compile. A variant without a target gets ``arch``.
        arch: target such as ``sm_100a``.
        jobs: subprocesses at a time.
        progress: called with each record, from other threads, as it comes.
        fa4_dir: folder that holds a ``flash_attn`` package to compile instead of the
            FA4 that vLLM vendors; not for sm_90.

    Returns:
        A record per variant, in the order given.

    Raises:
        ValueError: if ``arch`` or ``jobs`` makes no sense.
        DisassemblerMissing: if Triton's disassembler is not installed.
        CodegenError: if a variant does not compile.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)
    check_arch(arch)
    wanted = [v if v.arch else replace(v, arch=arch) for v in variants]
    # Targets stay together, so that few workers are started for each.
    todo = list(dict.fromkeys([x for v in wanted for x in (v.unmasked, v)]))
    todo.sort(key=lambda variant: variant.arch)
    work: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    for variant in todo:
        work.put(variant)
    done: dict[Variant, CodegenRecord] = {}
    failures: list[CodegenError] = []
    threads = [
        threading.Thread(target=_drain, args=(work, done, failures, progress, fa4_dir))
        for _ in range(min(jobs, len(todo)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        # An interrupt: no worker begins another variant.
        failures.append(CodegenError("interrupted"))
        raise
    if failures:
        raise failures[0]
    return [done[v].against(done[v.unmasked]) for v in wanted]


def _drain(
    work: "queue.SimpleQueue[Variant]",
    done: dict[Variant, CodegenRecord],
    failures: list[CodegenError],
    progress: Callable[[CodegenRecord], None] | None,
    fa4_dir: Path | None,
) -> None:
    worker = None
    try:
        while not failures:
            try:
                variant = work.get_nowait()
            except queue.Empty:
                break
            if worker is None or worker.arch != variant.arch:
                if worker is not None:
                    worker.close()
                worker = _Worker(variant.arch, fa4_dir)
            record = worker.compile(variant)
            done[variant] = record
            if progress is not None:
                progress(record)
    except CodegenError as error:
        failures.append(error)
    except Exception as error:
        failures.append(CodegenError(f"{type(error).__name__}: {error}"))
    finally:
        if worker is not None:
            worker.close()


class _Worker:
    """One subprocess for one target, with a private folder that it removes."""

    def __init__(self, arch: str, fa4_dir: Path | None) -> None:
        self.arch = arch
        self._folder = tempfile.TemporaryDirectory(prefix="sparse-mla-codegen-")
        folder = Path(self._folder.name)
        dump_dir = folder / "dump"
        dump_dir.mkdir()
        self._log = (folder / "log").open("w+")
        env = os.environ | environment(arch, dump_dir)
        env.pop("TRITON_INTERPRET", None)
        # The same packages as here, whatever put them on the path.
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(fa4_dir or "")],
            env=env,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def compile(self, variant: Variant) -> CodegenRecord:
        try:
            print(json.dumps(asdict(variant)), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise CodegenError(
                f"the worker for {self.arch} ended with code "
                f"{self._process.returncode} at {variant.label}:\n"
                + "".join(self._log.readlines()[-20:])
            )
        answer = json.loads(line)
        if "error" in answer:
            raise CodegenError(
                f"{variant.label} did not compile for {self.arch}: "
                f"{answer['error']}\n{answer['traceback']}"
            )
        return CodegenRecord.from_dict(answer["record"])

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""See from outside a server which prefills took masked MHA, and its GPU memory.

``probe_environment`` makes a server load the two functions below as further vLLM
plugins. ``register`` appends a JSON line to a file for every call of FA4 with a packed
mask. It can also tell the dispatch that this process is one of N tensor-parallel ranks,
so that one GPU serves what one rank of N would, and lift the bounds on the prefill
lengths that take masked MHA. ``register_gpu_memory`` writes once a second what
PyTorch's allocator holds; it touches nothing else, so that stock vLLM can load it too.
"""

import functools
import inspect
import json
import os
import threading
import time
from pathlib import Path
from typing import TextIO

import torch

GPU_MEMORY_PERIOD_S = 0.25
GPU_MEMORY_PLUGIN = "sparse_mla_gpu_memory_probe"

_MASKED_MHA = "masked_mha.jsonl"
_GPU_MEMORY = "gpu_memory.jsonl"
_FOLDER = "SPARSE_MLA_PROBE_FOLDER"
_RANKS = "SPARSE_MLA_PROBE_RANKS"
_ALL_LENGTHS = "SPARSE_MLA_PROBE_ALL_LENGTHS"


def probe_environment(
    folder: Path, *, ranks: int = 1, all_lengths: bool = False
) -> dict[str, str]:
    """Environment for a server with the probe.

    Args:
        folder: Gets the entry point and the files of records.
        ranks: Tensor-parallel ranks that the dispatch is told of.
        all_lengths: Where masked MHA is available, every prefill longer than the
            top-k takes it, whatever the table or the estimate says.
    """
    write_plugins(
        folder / "plugin",
        sparse_mla_probe=f"{__name__}:register",
        **{GPU_MEMORY_PLUGIN: f"{__name__}:register_gpu_memory"},
    )
    path = [str(folder / "plugin"), str(Path(__file__).resolve().parents[1])]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(path),
        _FOLDER: str(folder),
        _RANKS: str(ranks),
        _ALL_LENGTHS: str(int(all_lengths)),
    }


def write_plugins(folder: Path, **entry_points: str) -> None:
    """Make vLLM find these general plugins where ``folder`` is on the path."""
    name = next(iter(entry_points))
    dist_info = folder / f"{name}-0.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
    )
    lines = [f"{point} = {value}\n" for point, value in entry_points.items()]
    (dist_info / "entry_points.txt").write_text(
        "".join(["[vllm.general_plugins]\n", *lines])
    )


def read_records(folder: Path) -> list[dict]:
    """The calls recorded so far, of all processes.

    Each has ``pid``, ``num_heads`` (of the rank), ``max_seqlen_q``,
    ``max_seqlen_k`` and ``causal``; a call that is not causal covers a chunk of
    context.
    """
    return _read(folder / _MASKED_MHA)


def read_gpu_memory(folder: Path) -> list[dict]:
    """What PyTorch's allocator held so far, of all processes with a GPU.

    Each has ``pid``; ``time`` in seconds of ``time.time()``; ``allocated`` and
    ``reserved`` in bytes: what tensors occupy, and what was taken from the GPU.
    """
    return _read(folder / _GPU_MEMORY)


def gpu_mib_at(folder: Path, moment: float) -> dict[str, float]:
    """A server's ``allocated`` and ``reserved`` MiB, first seen after ``moment``.

    Raises:
        RuntimeError: no process reports any within some seconds.
    """
    deadline = time.monotonic() + 40 * GPU_MEMORY_PERIOD_S
    while time.monotonic() < deadline:
        for record in read_gpu_memory(folder):
            if record["time"] >= moment:
                return {
                    name: record[name] / 2**20 for name in ("allocated", "reserved")
                }
        time.sleep(GPU_MEMORY_PERIOD_S / 2)
    raise RuntimeError(f"the server of {folder} does not report its memory")


def _read(file: Path) -> list[dict]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def register() -> None:
    """Wraps the overlaid layer; runs in every process that loads plugins."""
    from vllm_sparse_mla.plugin import register as register_patch_set

    # Whichever plugin comes first: the layer must not be imported unpatched.
    register_patch_set()

    from vllm.model_executor.layers.attention import (
        mla_attention,
        sparse_mla_attention,
    )

    impl = sparse_mla_attention.SparseMLACommonImpl
    if hasattr(impl._run_masked_mha, "__wrapped__"):
        return
    _record_masked_mha(impl)
    use_masked_mha = mla_attention._use_masked_mha
    ranks = int(os.environ[_RANKS])
    if ranks > 1:
        available = _scale(
            sparse_mla_attention._is_masked_mha_available, "num_heads_total", ranks
        )
        # Upstream's metadata builder has a binding of its own.
        sparse_mla_attention._is_masked_mha_available = available
        sparse_mla_attention._upstream._is_masked_mha_available = available
        use_masked_mha = _scale(use_masked_mha, "tensor_parallel_size", ranks)
    if os.environ[_ALL_LENGTHS] == "1":

        def use_masked_mha(**kwargs):
            return True

        impl.masked_mha_pays = lambda *args: True

    mla_attention._use_masked_mha = use_masked_mha


@functools.cache
def register_gpu_memory() -> None:
    """Starts to watch the allocator; runs in every process that loads plugins."""
    _start_watching_gpu_memory()
    # A forked child loads no plugins anew, and inherits no thread.
    os.register_at_fork(after_in_child=_start_watching_gpu_memory)


def _start_watching_gpu_memory() -> None:
    name = GPU_MEMORY_PLUGIN
    threading.Thread(target=_watch_gpu_memory, name=name, daemon=True).start()


def _watch_gpu_memory() -> None:
    while True:
        time.sleep(GPU_MEMORY_PERIOD_S)
        if torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats()
            sizes = {
                name: stats[f"{name}_bytes.all.current"]
                for name in ("allocated", "reserved")
            }
            _write(_GPU_MEMORY, {"time": time.time()} | sizes)


@functools.cache
def _file(name: str, pid: int) -> TextIO:
    """This process's handle; opened once, so that a record costs microseconds."""
    return (Path(os.environ[_FOLDER]) / name).open("a", buffering=1)


def _write(name: str, record: dict) -> None:
    record = {"pid": os.getpid()} | record
    _file(name, os.getpid()).write(json.dumps(record) + "\n")


def _record_masked_mha(impl: type) -> None:
    run = impl._run_masked_mha
    signature = inspect.signature(run)

    @functools.wraps(run)
    def recorded(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        names = ("max_seqlen_q", "max_seqlen_k", "causal")
        record = {"num_heads": self.num_heads} | {name: call[name] for name in names}
        _write(_MASKED_MHA, record)
        return run(self, *args, **kwargs)

    impl._run_masked_mha = recorded


def _scale(function, name: str, factor: int):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def scaled(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.arguments[name] *= factor
        return function(*call.args, **call.kwargs)

    return scaled

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""See from outside a server which prefills took masked MHA.

``probe_environment`` makes a server load ``register`` below as one more vLLM
plugin. It appends a JSON line to a file for every call of FA4 with a packed mask.
It can also tell the dispatch that this process is one of N tensor-parallel ranks,
so that one GPU serves what one rank of N would, and lift the bounds on the prefill
lengths that take masked MHA.
"""

import functools
import inspect
import json
import os
from pathlib import Path
from typing import TextIO

_FILE = "SPARSE_MLA_PROBE_FILE"
_RANKS = "SPARSE_MLA_PROBE_RANKS"
_ALL_LENGTHS = "SPARSE_MLA_PROBE_ALL_LENGTHS"
_DIST_INFO = "sparse_mla_probe-0.dist-info"


def probe_environment(
    folder: Path, *, ranks: int = 1, all_lengths: bool = False
) -> dict[str, str]:
    """Environment for a server with the probe.

    Args:
        folder: Gets the entry point and the file of records.
        ranks: Tensor-parallel ranks that the dispatch is told of.
        all_lengths: Where masked MHA is available, every prefill longer than the
            top-k takes it, whatever the table of measured lengths says.
    """
    dist_info = folder / "plugin" / _DIST_INFO
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sparse_mla_probe\nVersion: 0\n"
    )
    (dist_info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nsparse_mla_probe = "
        "vllm_sparse_mla.serving.probe:register\n"
    )
    path = [str(folder / "plugin")]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(path),
        _FILE: str(folder / "masked_mha.jsonl"),
        _RANKS: str(ranks),
        _ALL_LENGTHS: str(int(all_lengths)),
    }


def read_records(folder: Path) -> list[dict]:
    """The calls recorded so far, of all processes.

    Each has ``pid``, ``num_heads`` (of the rank), ``max_seqlen_q``,
    ``max_seqlen_k`` and ``causal``; a call that is not causal covers a chunk of
    context.
    """
    file = folder / "masked_mha.jsonl"
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

    mla_attention._use_masked_mha = use_masked_mha


@functools.cache
def _records(pid: int) -> TextIO:
    """This process's handle; opened once, so that a record costs microseconds."""
    return open(os.environ[_FILE], "a", buffering=1)


def _record_masked_mha(impl: type) -> None:
    run = impl._run_masked_mha
    signature = inspect.signature(run)

    @functools.wraps(run)
    def recorded(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        record = {
            "pid": os.getpid(),
            "num_heads": self.num_heads,
            "max_seqlen_q": call["max_seqlen_q"],
            "max_seqlen_k": call["max_seqlen_k"],
            "causal": call["causal"],
        }
        _records(os.getpid()).write(json.dumps(record) + "\n")
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

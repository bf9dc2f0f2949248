# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether masked MHA will serve a model here, for which prompts, and if not why not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention import sparse_mla_attention as layer_module
from vllm.v1.attention.backends.fa_utils import is_fa_version_supported
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm_sparse_mla import envs

_DIMS = (
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_QUERY_LENS = (1024, 2048, 4096, 8192, 16384)
_BATCH_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class LengthRange:
    """Sequence lengths for which a prefill may run as masked MHA.

    Attributes:
        first: shortest sequence in tokens.
        last: longest sequence in tokens.
        min_query_len: tokens that the batch's longest query must have; 0 if any.
    """

    first: int
    last: int
    min_query_len: int


@dataclass(frozen=True)
class BackendRanges:
    """What vLLM's thresholds admit with one attention backend.

    Attributes:
        backend: the decode backend that vLLM selects when it serves.
        whole_prompts: prompts that one step computes from their first token.
        with_context: prefills of which earlier steps computed a part.
    """

    backend: str
    whole_prompts: tuple[LengthRange, ...]
    with_context: tuple[LengthRange, ...]


@dataclass(frozen=True)
class WorkspaceRow:
    """Longest sequence whose mask fits the workspace, by the batch's shape.

    Attributes:
        query_len: longest query of the batch.
        longest_sequence: requests in the batch -> tokens. With context, a longer one
            has its mask built range by range; without, it is computed by sparse MQA.
    """

    query_len: int
    longest_sequence: dict[int, int]


@dataclass(frozen=True)
class ServingReport:
    """The answers for one model, tensor parallel size and KV cache dtype.

    Attributes:
        reasons: why masked MHA will not be used, a sentence each; empty if it will.
        backends: what is admitted, where it will be used.
        workspace_bytes: size of the mask workspace, per metadata builder.
        workspace: which batch shapes fit it.
    """

    model: str
    tensor_parallel_size: int
    kv_cache_dtype: str
    index_topk: int | None
    reasons: tuple[str, ...]
    backends: tuple[BackendRanges, ...]
    workspace_bytes: int
    workspace: tuple[WorkspaceRow, ...]

    @property
    def used(self) -> bool:
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        def plain(rows: tuple) -> list[dict]:
            return [vars(row) for row in rows]

        backends = [
            {
                "backend": row.backend,
                "whole_prompts": plain(row.whole_prompts),
                "with_context": plain(row.with_context),
            }
            for row in self.backends
        ]
        changed = {"backends": backends, "workspace": plain(self.workspace)}
        return {"used": self.used} | vars(self) | changed


def read_config(model: str) -> dict[str, Any]:
    """A model's configuration, from its folder or its `config.json`.

    Raises:
        ValueError: if there is no such file, or it is not a JSON object.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model must be a folder with a config.json, or that file, got {model}"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"model must have a JSON config, got {path}: {error}"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"model must have a JSON object as its config, got {path}")
    return config.get("text_config", config)


def _admitted(
    ranges: tuple[tuple[int, int], ...], index_topk: int, whole: bool
) -> tuple[LengthRange, ...]:
    """Upstream's thresholds as ranges of lengths.

    The first threshold that holds a sequence decides. Up to the top-k dense attention
    serves, whatever they say. A whole prompt is its own query.
    """
    admitted: list[LengthRange] = []
    first = index_topk + 1
    for last, min_query_len in ranges:
        start = max(first, min_query_len) if whole else first
        if start <= last:
            if whole and admitted and admitted[-1].last == start - 1:
                start = admitted.pop().first
            admitted.append(LengthRange(start, last, 0 if whole else min_query_len))
        first = max(first, last + 1)
    return tuple(admitted)


def _backends(
    dims: Mapping[str, int], index_topk: int, tensor_parallel_size: int, sm90: bool
) -> tuple[BackendRanges, ...]:
    if sm90:
        from vllm.model_executor.layers.attention import sparse_mla_sm90

        table = sparse_mla_sm90.SM90_MASKED_MHA_THRESHOLDS
    else:
        table = mla_attention._MASKED_MHA_THRESHOLDS
    qk_head_dim = dims["qk_nope_head_dim"] + dims["qk_rope_head_dim"]
    found = []
    for backend, sizes in table.get((qk_head_dim, dims["v_head_dim"]), {}).items():
        if tensor_parallel_size in sizes:
            whole, context = sizes[tensor_parallel_size]
            context = whole if context is None else context
            found.append(
                BackendRanges(
                    backend,
                    _admitted(whole, index_topk, whole=True),
                    _admitted(context, index_topk, whole=False),
                )
            )
    return tuple(found)


def _workspace_rows(workspace_bytes: int) -> tuple[WorkspaceRow, ...]:
    rows = []
    for query_len in _QUERY_LENS:
        longest = {}
        for batch_size in _BATCH_SIZES:
            _, padded, group = layer_module._topk_mask_shape(batch_size, query_len, 1)
            groups = workspace_bytes // 4 // (batch_size * padded * group)
            longest[batch_size] = 32 * groups * group
        rows.append(WorkspaceRow(query_len, longest))
    return tuple(rows)


def _device_reason(capability: tuple[int, int] | None, sm90: bool) -> str:
    if capability is None:
        return "There is no NVIDIA GPU here."
    major, minor = capability
    if major == 10 or (major == 9 and sm90):
        return ""
    if major == 9:
        return (
            "The GPU is SM90, where masked MHA is used only with "
            "VLLM_SPARSE_MLA_SM90=1."
        )
    return f"The GPU is SM{major}{minor}; masked MHA needs SM100."


def _fa4_usable(dims: Mapping[str, int], kv_cache_dtype: str, sm90: bool) -> bool:
    if sm90:
        # The layer's own question would install SM90's thresholds in this process.
        return is_fa_version_supported(4)
    return layer_module._is_masked_mha_available(*dims.values(), kv_cache_dtype)


def report_serving(
    model: str,
    tensor_parallel_size: int,
    kv_cache_dtype: str,
    capability: tuple[int, int] | None,
) -> ServingReport:
    """Answer for one model.

    Args:
        model: its folder or `config.json`.
        tensor_parallel_size: as `vllm serve` will get it.
        kv_cache_dtype: as `vllm serve` will get it.
        capability: compute capability of the GPU, None without one.

    Raises:
        ValueError: a model without a readable configuration.
    """
    config = read_config(model)
    dims = {name: config.get(name) for name in _DIMS}
    index_topk = config.get("index_topk")
    sm90 = envs.sm90() and capability is not None and capability[0] == 9
    reasons = [_device_reason(capability, sm90)]
    quantized = is_quantized_kv_cache(kv_cache_dtype)
    if quantized:
        reasons.append(
            f"The KV cache is quantized ({kv_cache_dtype}); masked MHA needs auto or "
            "bfloat16."
        )
    backends: tuple[BackendRanges, ...] = ()
    known = tuple(dims.values()) in layer_module.MASKED_MHA_MODEL_DIMS
    if index_topk is None:
        reasons.append("The model has no sparse attention (no index_topk).")
    elif not known:
        sizes = ", ".join(f"{name} {value}" for name, value in dims.items())
        reasons.append(f"FA4 has no masked kernel for the model's dimensions: {sizes}.")
    else:
        backends = _backends(dims, index_topk, tensor_parallel_size, sm90)
        if not any(row.whole_prompts or row.with_context for row in backends):
            reasons.append(
                "vLLM's thresholds admit no prompt length at tensor parallel size "
                f"{tensor_parallel_size}."
            )
    reasons = [reason for reason in reasons if reason]
    if not reasons and not _fa4_usable(dims, kv_cache_dtype, sm90):
        reasons.append("vLLM does not select FA4 on this GPU.")
    workspace_bytes = layer_module.GLOBAL_TOPK_MASK_MAX_BYTES
    return ServingReport(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
        index_topk=index_topk,
        reasons=tuple(reasons),
        backends=backends,
        workspace_bytes=workspace_bytes,
        workspace=_workspace_rows(workspace_bytes),
    )

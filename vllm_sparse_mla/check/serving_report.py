# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether masked MHA will serve a model here, for which prompts, and if not why not."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm.model_executor.layers.attention import (
    mla_attention,
    sparse_mla_choice,
    sparse_mla_estimate,
)
from vllm.model_executor.layers.attention import sparse_mla_attention as layer_module
from vllm.model_executor.layers.attention.sparse_mla_kv_cache import halve_lengths
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm_sparse_mla import envs
from vllm_sparse_mla.check.launch import Launch, LaunchRefused, resolve_launch

# Its prefill batches run on the other's kernel, so vLLM gives it the other's rows.
_SHARED_ROWS = {"FLASH_ATTN_MLA_SPARSE_FA4": "FLASHINFER_MLA_SPARSE"}
_SEQ_LENS = (4096, 8192, 16384, 32768, 65536)
_QUERY_LENS = (1024, 2048, 4096, 8192, 16384)
_BATCH_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class LengthRange:
    """Sequence lengths for which a prefill may run as masked MHA."""

    first: int  # shortest sequence in tokens
    last: int  # longest sequence in tokens
    min_query_len: int  # tokens that the batch's longest query must have; 0 if any


@dataclass(frozen=True)
class WorkspaceRow:
    """Longest sequence whose mask fits the workspace, by the batch's shape."""

    query_len: int  # longest query of the batch
    # Requests in the batch -> tokens. With context, a longer one has its mask built
    # range by range; without, it is computed by sparse MQA.
    longest_sequence: dict[int, int]


@dataclass(frozen=True)
class ServingReport:
    """The answers for one launch."""

    model: str  # as given, as are the three that follow
    gpu: str  # architecture, such as sm_100
    tensor_parallel_size: int  # ranks
    asked_kv_cache_dtype: str  # what `--kv-cache-dtype` was
    # Why masked MHA will not be used, a sentence each; empty if it will.
    reasons: tuple[str, ...]
    # What vLLM makes of it; None if it would not start, or has no sparse MLA.
    launch: Launch | None = None
    # Prompts that one step computes from their first token.
    whole_prompts: tuple[LengthRange, ...] = ()
    # Prefills of which earlier steps computed a part.
    with_context: tuple[LengthRange, ...] = ()
    # Whose measurements decide between masked MHA and sparse MQA; empty where vLLM's
    # table of lengths does.
    estimated_by: str = ""
    # Why an estimate that was asked for does not decide; else empty.
    no_estimate: str = ""
    workspace_bytes: int = 0  # size of the mask workspace, per metadata builder
    workspace: tuple[WorkspaceRow, ...] = ()  # which batch shapes fit it

    @property
    def used(self) -> bool:
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        return {"used": self.used} | asdict(self)


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


def _estimate(
    launch: Launch, tensor_parallel_size: int, capability: tuple[int, int]
) -> sparse_mla_estimate.PrefillEstimate | None:
    """What a server would estimate by; None where vLLM's table decides.

    The GPU is compared with the one of the coefficients if it is here.

    Raises:
        ValueError: it was asked for, and there is none.
    """
    costs = sparse_mla_choice.costs_asked_for()
    if costs is None:
        return None
    here = torch.cuda.is_available() and torch.cuda.get_device_capability()
    if costs is not sparse_mla_choice.COSTS and here == capability:
        properties = torch.cuda.get_device_properties()
        sparse_mla_estimate.check_measured_on(
            costs, properties.name, properties.multi_processor_count
        )
    heads, _, nope, rope, v_head_dim = launch.dims
    return sparse_mla_estimate.make_estimate(
        costs,
        nope + rope,
        v_head_dim,
        launch.backend,
        launch.kv_cache_dtype,
        heads // tensor_parallel_size,
        launch.index_topk,
    )


def _estimated(
    estimate: sparse_mla_estimate.PrefillEstimate,
) -> tuple[tuple[LengthRange, ...], tuple[LengthRange, ...]]:
    """Lengths that take masked MHA by an estimate, for a request alone in its step.

    With a context, for sequences of some lengths, and from which query length on.
    """
    whole = sparse_mla_estimate.whole_prompts(estimate, _SEQ_LENS[-1])
    context = []
    for seq_len in _SEQ_LENS:
        parts = sparse_mla_estimate.last_parts(estimate, seq_len)
        if parts and parts[-1][1] == seq_len - 1:
            context.append(LengthRange(seq_len, seq_len, parts[-1][0]))
    return tuple(LengthRange(*lengths, 0) for lengths in whole), tuple(context)


def _thresholds(
    launch: Launch, tensor_parallel_size: int
) -> tuple[tuple[LengthRange, ...], tuple[LengthRange, ...]]:
    """The same by vLLM's table, which is of SM100."""
    _, _, nope, rope, v_head_dim = launch.dims
    table = mla_attention._MASKED_MHA_THRESHOLDS
    if is_quantized_kv_cache(launch.kv_cache_dtype):
        table = halve_lengths(table)
    backend = _SHARED_ROWS.get(launch.backend, launch.backend)
    sizes = table.get((nope + rope, v_head_dim), {}).get(backend, {})
    whole, context = sizes.get(tensor_parallel_size, ((), ()))
    return (
        _admitted(whole, launch.index_topk, whole=True),
        _admitted(whole if context is None else context, launch.index_topk, False),
    )


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


def _reason_against(launch: Launch, capability: tuple[int, int]) -> str:
    """Why the layer's own question is answered with no."""
    major, minor = capability
    if launch.dims not in layer_module.MASKED_MHA_MODEL_DIMS:
        heads, rank, nope, rope, v_head_dim = launch.dims
        return (
            "FA4 has no masked kernel for the model's dimensions: "
            f"{heads} heads, kv_lora_rank {rank}, qk_nope_head_dim {nope}, "
            f"qk_rope_head_dim {rope}, v_head_dim {v_head_dim}."
        )
    if launch.kv_cache_refusal is not None:
        return (
            f"The KV cache is {launch.kv_cache_dtype}, decided by {launch.decided_by}: "
            f"{launch.kv_cache_refusal}."
        )
    if major == 9 and not envs.sm90():
        return (
            "The GPU is SM90, where masked MHA is used only with "
            "VLLM_SPARSE_MLA_SM90=1."
        )
    if major not in (9, 10):
        return f"The GPU is SM{major}{minor}; masked MHA needs SM100 or SM90."
    return "vLLM does not select FA4 on this GPU."


def report_serving(
    model: str,
    tensor_parallel_size: int,
    kv_cache_dtype: str,
    capability: tuple[int, int],
) -> ServingReport:
    """Answer for one launch, in a process that `gpu.stand_in_for_gpu` has prepared.

    Args:
        model: its folder or `config.json`.
        tensor_parallel_size: as `vllm serve` will get it.
        kv_cache_dtype: as `vllm serve` will get it.
        capability: the GPU's compute capability.

    Raises:
        ValueError: an argument that makes no sense.
    """
    gpu = "sm_{}{}".format(*capability)
    asked = (model, gpu, tensor_parallel_size, kv_cache_dtype)
    try:
        launch = resolve_launch(model, tensor_parallel_size, kv_cache_dtype)
    except LaunchRefused as refusal:
        return ServingReport(*asked, (f"vLLM refuses this launch: {refusal}",))
    if launch is None:
        return ServingReport(*asked, ("The model has no sparse MLA.",))
    estimate, no_estimate = None, ""
    try:
        estimate = _estimate(launch, tensor_parallel_size, capability)
    except ValueError as error:
        no_estimate = str(error)
    whole_prompts, with_context = (), ()
    if estimate is not None:
        whole_prompts, with_context = _estimated(estimate)
    elif capability[0] != 9:
        whole_prompts, with_context = _thresholds(launch, tensor_parallel_size)
    reasons = []
    if not launch.available:
        reasons.append(_reason_against(launch, capability))
    elif not whole_prompts and not with_context:
        reasons.append(
            f"The thresholds for {launch.backend} admit no prompt length at tensor "
            f"parallel size {tensor_parallel_size}."
        )
    workspace_bytes = layer_module.GLOBAL_TOPK_MASK_MAX_BYTES
    return ServingReport(
        *asked,
        tuple(reasons),
        launch,
        whole_prompts,
        with_context,
        "" if estimate is None else estimate.gpu,
        no_estimate,
        workspace_bytes,
        _workspace_rows(workspace_bytes),
    )

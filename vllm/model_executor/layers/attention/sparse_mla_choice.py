# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which way a step's prefills take where an estimate decides, and where it does.

It decides where its coefficients are to be had: on SM90 under the Hopper opt-in those
of an H200, and on any GPU those of a file that the operator names with
``VLLM_SPARSE_MLA_COSTS`` and that was measured there. Elsewhere dispatch is vLLM's.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_context import takes_one_pass
from vllm.model_executor.layers.attention.sparse_mla_estimate import (
    Costs,
    PrefillEstimate,
    check_measured_on,
    last_parts,
    make_estimate,
    read_costs,
    whole_prompts,
)
from vllm.model_executor.layers.attention.sparse_mla_h200 import COSTS
from vllm.model_executor.layers.attention.sparse_mla_sm90 import (
    sm90_masked_mha_enabled,
)
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonPrefillMetadata,
    )

logger = init_logger(__name__)


def costs_asked_for() -> Costs | None:
    """The coefficients that the operator asked for; None if for none.

    Raises:
        ValueError: the file that ``VLLM_SPARSE_MLA_COSTS`` names has none.
    """
    path = getattr(envs, "VLLM_SPARSE_MLA_COSTS", None)
    if path:
        return read_costs(path)
    return COSTS if sm90_masked_mha_enabled() else None


@functools.cache
def prefill_estimate(
    qk_head_dim: int,
    v_head_dim: int,
    backend: str,
    kv_cache_dtype: str,
    num_heads: int,
    topk: int,
) -> PrefillEstimate | None:
    """What decides between masked MHA and sparse MQA for such a layer on this GPU.

    Made once a process. None where vLLM's dispatch stays; if that is because what was
    asked for cannot be used, with a line in the log. The arguments are those of
    ``make_estimate``.
    """
    try:
        costs = costs_asked_for()
        if costs is None:
            return None
        if costs is not COSTS:
            check_measured_on(
                costs,
                current_platform.get_device_name(),
                num_compute_units(),
            )
        return make_estimate(
            costs, qk_head_dim, v_head_dim, backend, kv_cache_dtype, num_heads, topk
        )
    except ValueError as error:
        # On SM90 vLLM's own dispatch takes no prefill to masked MHA.
        logger.warning_once(
            "Sparse MLA: no estimate, so %s: %s",
            "VLLM_SPARSE_MLA_SM90 has no effect on prefills"
            if sm90_masked_mha_enabled()
            else "prefills are dispatched as in vLLM",
            error,
        )
        return None


def step_pays(
    prefill: "MLACommonPrefillMetadata", estimate: PrefillEstimate, otherwise: bool
) -> bool:
    """Whether a step's prefills are faster as masked MHA.

    Estimated by the first layer that asks; the metadata keeps the answer for others.

    Args:
        prefill: the step's.
        estimate: the layer's.
        otherwise: the answer where lengths make no sense.
    """
    known = getattr(prefill, "_masked_mha_pays", None)
    if known is not None and known[0] is estimate:
        return known[1]
    assert prefill.query_lens_cpu is not None
    queries, context = prefill.query_lens_cpu.numpy(), prefill.chunked_context
    cached, num_chunks = 0, 0
    if context is not None:
        cached = np.fromiter(context.context_lens_list, np.int64, len(queries))
        if not (estimate.one_pass and takes_one_pass(prefill, estimate.num_heads)):
            num_chunks = len(context.chunks)
    try:
        masked, sparse = estimate.microseconds(queries, cached, num_chunks)
    except ValueError as error:
        logger.warning_once("Sparse MLA: a step is not estimated: %s", error)
        pays = otherwise
    else:
        logger.debug(
            "Sparse MLA: prefills of %s new tokens after %s are estimated at %.0f us "
            "by masked MHA and %.0f us by sparse MQA, a layer",
            queries,
            cached,
            masked,
            sparse,
        )
        pays = masked < sparse
    prefill._masked_mha_pays = estimate, pays  # type: ignore[attr-defined]
    return pays


def describe_estimate(estimate: PrefillEstimate, longest: int) -> str:
    """At which lengths a request alone in its step takes masked MHA, for people.

    Args:
        estimate: the layer's.
        longest: sequence of the server.
    """
    parts = [f"whole prompts of {_describe(whole_prompts(estimate, longest))} tokens"]
    for seq_len in (8192, 32768):
        if seq_len <= longest:
            lengths = _describe(last_parts(estimate, seq_len))
            parts.append(f"the last {lengths} of {seq_len} tokens")
    return (
        f"{', '.join(parts)} (alone in a step, by measurements of {estimate.gpu}, with "
        f"{estimate.num_heads} heads and a top-k of {estimate.topk})"
    )


def _describe(ranges: tuple[tuple[int, int], ...]) -> str:
    return " and ".join(f"{first} to {last}" for first, last in ranges) or "no"

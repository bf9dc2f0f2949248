# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Hopper opt-in of masked MHA: its switch, and the steps that take it.

Dispatch is SM100-only unless the operator sets ``VLLM_SPARSE_MLA_SM90=1``. Then masked
MHA is also taken on SM90, by the steps for which it is estimated to be faster.
"""

import functools
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_estimate import (
    TILE,
    PrefillEstimate,
    last_parts,
    make_estimate,
    whole_prompts,
)
from vllm.model_executor.layers.attention.sparse_mla_h200 import COSTS
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonPrefillMetadata,
    )

logger = init_logger(__name__)

# FA4 combines up to 32 parts of the keys with one kernel.
MAX_CONTEXT_SPLITS = 32
# A shorter part is not worth its launch.
_TILES_OF_A_SPLIT = 4


@functools.cache
def _opted_in() -> bool:
    """Whether the operator asked for it and FA4 can do it; asked once a process."""
    if not getattr(envs, "VLLM_SPARSE_MLA_SM90", False):
        return False
    try:
        from vllm.vllm_flash_attn.cute.mask import AttentionMask

        AttentionMask.apply_mask_mod_sm90_vector  # noqa: B018
    except (ImportError, AttributeError) as error:
        logger.warning(
            "VLLM_SPARSE_MLA_SM90 is set, but FA4 takes no packed masks on SM90 in "
            "this process: masked MHA stays off. The variable has to be set before "
            "vLLM starts. (%s)",
            error,
        )
        return False
    return True


def sm90_masked_mha_enabled() -> bool:
    """Whether this is SM90, the operator asked for masked MHA, and FA4 can do it."""
    return current_platform.is_device_capability_family(90) and _opted_in()


def context_splits(
    num_tokens: int, num_requests: int, max_seq_len: int, num_heads: int
) -> int:
    """Parts in which FA4 takes the cached keys of a chunk, to be merged by it.

    As many as give each multiprocessor a block where few queries alone would not. Not
    measured on SM100, where FA4 has a narrower tile for them: 1 there.

    Args:
        num_tokens: new tokens of the chunk's requests.
        num_requests: of the chunk.
        max_seq_len: most cached keys of a request.
        num_heads: of the rank.
    """
    # One query would make FA4 compile another kernel to merge by.
    if num_tokens < 2 or not sm90_masked_mha_enabled():
        return 1
    blocks = (num_tokens + num_requests * (TILE - 1)) // TILE * num_heads
    longest = max_seq_len // (TILE * _TILES_OF_A_SPLIT)
    return max(1, min(num_compute_units() // blocks, longest, MAX_CONTEXT_SPLITS))


@functools.cache
def prefill_estimate(
    qk_head_dim: int,
    v_head_dim: int,
    backend: str,
    kv_cache_dtype: str,
    num_heads: int,
    topk: int,
) -> PrefillEstimate | None:
    """What decides on SM90 between masked MHA and sparse MQA, for such a layer.

    Made once a process. None, with a line in the log, where nothing was measured.
    The arguments are those of ``make_estimate``.
    """
    try:
        return make_estimate(
            COSTS, qk_head_dim, v_head_dim, backend, kv_cache_dtype, num_heads, topk
        )
    except ValueError as error:
        logger.warning("Sparse MLA: prefills stay with sparse MQA on SM90: %s", error)
        return None


def step_pays(prefill: "MLACommonPrefillMetadata", estimate: PrefillEstimate) -> bool:
    """Whether a step's prefills are faster as masked MHA.

    Estimated by the first layer that asks; the metadata keeps the answer for others.
    """
    known = getattr(prefill, "_masked_mha_pays", None)
    if known is not None and known[0] is estimate:
        return known[1]
    queries, context = prefill.query_lens_cpu.numpy(), prefill.chunked_context
    cached, num_chunks = [0] * len(queries), 0
    if context is not None:
        cached, num_chunks = context.context_lens_list, len(context.chunks)
    try:
        masked, sparse = estimate.microseconds(queries, cached, num_chunks)
    except ValueError as error:
        logger.warning_once("Sparse MLA: a step stays with sparse MQA: %s", error)
        masked, sparse = 0.0, 0.0
    logger.debug(
        "Sparse MLA: prefills of %s new tokens after %s are estimated at %.0f us by "
        "masked MHA and %.0f us by sparse MQA, a layer",
        queries,
        cached,
        masked,
        sparse,
    )
    prefill._masked_mha_pays = estimate, masked < sparse
    return masked < sparse


def describe_estimate(estimate: PrefillEstimate, longest: int) -> str:
    """At which lengths a request alone in its step takes masked MHA, for people.

    Args:
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

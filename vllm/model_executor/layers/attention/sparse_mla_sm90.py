# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Hopper opt-in of masked MHA: its switch, and what FA4 needs on SM90.

Dispatch is SM100-only unless the operator sets ``VLLM_SPARSE_MLA_SM90=1``. Then masked
MHA is also taken on SM90, by the steps for which it is estimated to be faster.
"""

import functools
from collections.abc import Sequence

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_estimate import (
    is_faster_in_one_pass,
    num_context_splits,
)
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units

logger = init_logger(__name__)

# FA4 combines up to 32 parts of the keys with one kernel.
MAX_CONTEXT_SPLITS = 32


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
    if not sm90_masked_mha_enabled():
        return 1
    return num_context_splits(
        *(num_tokens, num_requests, max_seq_len, num_heads),
        *(num_compute_units(), MAX_CONTEXT_SPLITS),
    )


def one_pass_is_faster(
    query_lens: Sequence[int], context_lens: Sequence[int], num_heads: int
) -> bool:
    """Whether FA4 should take cached and new keys of a step in one call.

    Args:
        query_lens: new tokens of each request.
        context_lens: cached tokens of each request; some has any.
        num_heads: of the rank.
    """
    return is_faster_in_one_pass(
        *(query_lens, context_lens, num_heads),
        *(num_compute_units(), MAX_CONTEXT_SPLITS),
    )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Hopper opt-in of masked MHA: its switch and its prefill thresholds.

Dispatch is SM100-only unless the operator sets ``VLLM_SPARSE_MLA_SM90=1``. Then masked
MHA is also taken on SM90, for the prefill lengths of the table below.
"""

import functools

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

_Ranges = tuple[tuple[int, int], ...]

# Shaped as vLLM's table: (qk_head_dim, v_head_dim) -> attention backend -> tensor
# parallel size -> ranges for a pure prefill and for one with context. A range
# (max_seq_len, min_query_len) admits queries of at least min_query_len tokens; the
# first range that holds the sequence decides, and past the last one sparse MQA runs.
#
# Derived by benchmark_masked_prefill.py on an H200: where sparse MQA takes at least
# 1.05 times as long.
SM90_MASKED_MHA_THRESHOLDS: dict[
    tuple[int, int], dict[str, dict[int, tuple[_Ranges, _Ranges | None]]]
] = {
    (192, 128): {
        "FLASH_ATTN_MLA_SPARSE": {
            1: (((8192, 0),), ((4096, 2048),)),
            2: (((8192, 0),), ((4096, 2048),)),
            4: (((16384, 0),), ((4096, 1024), (8192, 2048))),
            8: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 2048))),
        },
        "FLASHMLA_SPARSE": {
            1: (((16384, 0),), ((4096, 1024),)),
            2: (((16384, 0),), ((4096, 1024),)),
            4: (((32768, 0),), ((4096, 1024), (8192, 2048), (16384, 8192))),
            8: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 2048))),
        },
    },
    (256, 256): {
        "FLASH_ATTN_MLA_SPARSE": {
            1: (((4096, 0),), ()),
            2: (((16384, 0),), ((4096, 1024), (8192, 4096))),
            4: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 4096))),
            8: (
                ((32768, 0),),
                ((4096, 1024), (8192, 1024), (16384, 2048), (32768, 8192)),
            ),
        },
        "FLASHMLA_SPARSE": {
            1: (((8192, 0),), ((4096, 2048),)),
            2: (((16384, 0),), ((4096, 1024), (8192, 4096))),
            4: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 4096))),
            8: (
                ((32768, 0),),
                ((4096, 1024), (8192, 1024), (16384, 2048), (32768, 4096)),
            ),
        },
    },
}


@functools.cache
def _opted_in() -> bool:
    """Whether the operator asked for it and FA4 can do it; asked once a process."""
    if not getattr(envs, "VLLM_SPARSE_MLA_SM90", False):
        return False
    try:
        from vllm.vllm_flash_attn.cute.mask import packed_mask_front  # noqa: F401
    except ImportError as error:
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


def install_sm90_thresholds() -> None:
    """Make SM90's thresholds the only ones in vLLM's table, and log what is on.

    vLLM's own rows were measured on SM100, also for backends that SM90 has, so they
    are replaced and not added to. Does nothing without the opt-in or off SM90; may be
    called again.
    """
    if not sm90_masked_mha_enabled():
        return
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.attention import mla_attention

    table = mla_attention._MASKED_MHA_THRESHOLDS
    table.clear()
    table.update(SM90_MASKED_MHA_THRESHOLDS)
    logger.info_once(
        "VLLM_SPARSE_MLA_SM90=1: masked MHA is on for SM90 prefills longer than the "
        "top-k: %s",
        describe_sm90_thresholds(get_tensor_model_parallel_world_size()),
    )


def describe_sm90_thresholds(tensor_parallel_size: int) -> str:
    """What SM90's table admits at one tensor parallel size, for people."""
    rows = []
    for (qk_head_dim, v_head_dim), backends in SM90_MASKED_MHA_THRESHOLDS.items():
        for backend, sizes in backends.items():
            if tensor_parallel_size not in sizes:
                continue
            pure, context = sizes[tensor_parallel_size]
            with_context = _describe_ranges(pure if context is None else context)
            rows.append(
                f"{backend} at {qk_head_dim}/{v_head_dim}: {_describe_ranges(pure)}, "
                f"with context {with_context}"
            )
    return "; ".join(rows) or f"nothing at tensor parallel size {tensor_parallel_size}"


def _describe_ranges(ranges: _Ranges) -> str:
    parts = [
        f"to {max_len} tokens" + (f" from {min_query} queries" if min_query else "")
        for max_len, min_query in ranges
    ]
    return " and ".join(parts) or "never"

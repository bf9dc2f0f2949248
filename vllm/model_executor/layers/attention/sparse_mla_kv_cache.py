# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV caches that masked MHA reads, and where it reads quantized ones.

A context is fetched chunk by chunk with the gathers of vLLM's dense MHA, which write
dequantized rows into the workspace. New tokens are attended to as they come.
"""

import functools

import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_sm90 import (
    sm90_masked_mha_enabled,
)

logger = init_logger(__name__)

_UNQUANTIZED = ("auto", "bfloat16", "float16")
# One value a byte and one scale for the cache.
_FLAT_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
# 512 e4m3 values, 4 float32 scales, 64 bfloat16 values of the RoPE part.
_FP8_DS_MLA_ROW_BYTES = 656
_FP8_DS_MLA_ROPE_DIM = 64


def kv_cache_refusal(kv_cache_dtype: str, qk_rope_head_dim: int) -> str | None:
    """Why masked MHA does not read this KV cache; None if it does.

    Args:
        kv_cache_dtype: as the layer has it, after the backend has made ``fp8`` its own.
        qk_rope_head_dim: of the model; 0 without a RoPE part.
    """
    if kv_cache_dtype in _UNQUANTIZED:
        return None
    if kv_cache_dtype == "nvfp4_ds_mla":
        return (
            "the gather of nvfp4_ds_mla always begins with a sequence's first key, so "
            "later chunks of a context cannot be fetched"
        )
    if kv_cache_dtype == "fp8_ds_mla":
        if qk_rope_head_dim != _FP8_DS_MLA_ROPE_DIM:
            return (
                f"rows of fp8_ds_mla have a RoPE part of {_FP8_DS_MLA_ROPE_DIM}, and "
                f"the model's has {qk_rope_head_dim}"
            )
    elif kv_cache_dtype not in _FLAT_FP8:
        return f"masked MHA knows no gather for {kv_cache_dtype}"
    if sm90_masked_mha_enabled() or getattr(
        envs, "VLLM_SPARSE_MLA_QUANTIZED_KV", False
    ):
        return None
    return (
        f"{kv_cache_dtype} is quantized, and where that pays was not measured on this "
        "GPU; --kv-cache-dtype bfloat16 uses masked MHA, "
        "VLLM_SPARSE_MLA_QUANTIZED_KV=1 uses it nevertheless"
    )


def reads_quantized_kv_cache(kv_cache_dtype: str, qk_rope_head_dim: int) -> bool:
    """Whether masked MHA reads this KV cache; the log says once why not.

    Arguments are those of ``kv_cache_refusal``.
    """
    refusal = kv_cache_refusal(kv_cache_dtype, qk_rope_head_dim)
    if refusal is not None:
        logger.info_once(
            "Sparse MLA: prefills longer than the top-k do not take masked MHA: %s.",
            refusal,
        )
    return refusal is None


def check_kv_cache(
    cache: torch.Tensor,
    kv_cache_dtype: str,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    k_scale: torch.Tensor | None,
) -> None:
    """Refuse a cache that the gather of its dtype would misread.

    Args:
        cache: ``[blocks, block_size, entry]``.
        kv_cache_dtype: as of ``kv_cache_refusal``.
        kv_lora_rank: entries of a row before its RoPE part.
        qk_rope_head_dim: of the model.
        k_scale: float32, one number; only the flat FP8 formats need it.

    Raises:
        ValueError: An unknown dtype, rows of another width, or no scale.
    """
    width, itemsize = kv_lora_rank + qk_rope_head_dim, 2
    if kv_cache_dtype == "fp8_ds_mla":
        if (kv_lora_rank, qk_rope_head_dim) != (512, _FP8_DS_MLA_ROPE_DIM):
            raise ValueError(
                "kv_lora_rank and qk_rope_head_dim must be 512 and "
                f"{_FP8_DS_MLA_ROPE_DIM} for an fp8_ds_mla cache, got {kv_lora_rank} "
                f"and {qk_rope_head_dim}"
            )
        width, itemsize = _FP8_DS_MLA_ROW_BYTES, 1
    elif kv_cache_dtype in _FLAT_FP8:
        itemsize = 1
        if k_scale is None or k_scale.numel() != 1 or k_scale.dtype != torch.float32:
            found = None if k_scale is None else (k_scale.dtype, tuple(k_scale.shape))
            raise ValueError(
                f"k_scale must be one float32 for a KV cache of {kv_cache_dtype}, got "
                f"{found}"
            )
    elif kv_cache_dtype not in _UNQUANTIZED:
        raise ValueError(
            f"kv_cache_dtype must be one that masked MHA reads, got {kv_cache_dtype!r}"
        )
    if cache.shape[-1] != width or cache.element_size() != itemsize:
        raise ValueError(
            f"a KV cache of {kv_cache_dtype} must have rows of {width} entries of "
            f"{itemsize} bytes, got {cache.shape[-1]} of {cache.element_size()}"
        )


def halve_lengths(table: dict) -> dict:
    """The lengths of a table of masked-MHA thresholds halved.

    Least numbers of queries stay. FP8 at best halves what sparse MQA moves and
    multiplies, so it makes up for masked MHA at half the length at the earliest.
    """

    def halved(ranges):
        return ranges and tuple((length // 2, queries) for length, queries in ranges)

    return {
        dims: {
            backend: {size: tuple(map(halved, both)) for size, both in sizes.items()}
            for backend, sizes in backends.items()
        }
        for dims, backends in table.items()
    }


@functools.cache
def install_quantized_kv_thresholds() -> None:
    """Put halved lengths into vLLM's table, once, and log that they are a guess.

    For SM100, on loading a layer with a quantized cache under
    ``VLLM_SPARSE_MLA_QUANTIZED_KV=1``. Layers of that model without one follow the
    table too; in stock they take no masked MHA, for the metadata builder goes by the
    configuration's dtype.
    """
    from vllm.model_executor.layers.attention import mla_attention

    table = mla_attention._MASKED_MHA_THRESHOLDS
    table.update(halve_lengths(table))
    logger.info(
        "VLLM_SPARSE_MLA_QUANTIZED_KV=1: masked MHA is on over quantized KV caches, up "
        "to half the lengths that vLLM measured with a BF16 cache. They were not "
        "measured on SM100."
    )

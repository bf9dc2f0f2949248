# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bit-packed attention masks from top-k rows."""

import functools
import math

import torch

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.import_utils import has_cutedsl
from vllm.utils.math_utils import cdiv

logger = init_logger(__name__)

# What FA4's callbacks assume of a mask's base address and outer strides, in bytes.
TOPK_MASK_ALIGN_BYTES = 16

_SCATTER_BLOCK = 1024


def check_topk_mask_storage(mask: torch.Tensor, name: str = "mask") -> None:
    """Refuse a mask that FA4's callbacks cannot read with 16-byte loads.

    Raises:
        ValueError: Not int32 ``[batch, query, word]`` with a contiguous last
            dimension of whole 16-byte groups, base address and outer strides
            multiples of 16 bytes.
    """
    group_words = TOPK_MASK_ALIGN_BYTES // 4
    if mask.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {mask.dtype}")
    if mask.ndim != 3:
        raise ValueError(
            f"{name} must be 3-D [batch, query, word], got shape {tuple(mask.shape)}"
        )
    if mask.stride(2) != 1:
        raise ValueError(f"{name} must have last stride 1, got {mask.stride(2)}")
    if mask.shape[2] % group_words:
        raise ValueError(
            f"{name} must have a multiple of {group_words} words a row, "
            f"got {mask.shape[2]}"
        )
    if any(stride % group_words for stride in mask.stride()[:2]):
        raise ValueError(
            f"{name} must have batch and row strides that are multiples of "
            f"{TOPK_MASK_ALIGN_BYTES} bytes, got {mask.stride()} in words of 4 bytes"
        )
    if mask.data_ptr() % TOPK_MASK_ALIGN_BYTES:
        raise ValueError(
            f"{name} must start at a multiple of {TOPK_MASK_ALIGN_BYTES} bytes, "
            f"got address {mask.data_ptr():#x}"
        )


def topk_mask_view(
    workspace: torch.Tensor, shape: tuple[int, int, int]
) -> torch.Tensor:
    """The first words of the workspace as a mask.

    Raises:
        ValueError: The workspace has too few words, or does not start at a multiple
            of 16 bytes.
    """
    needed = math.prod(shape)
    if needed > workspace.numel():
        raise ValueError(
            f"topk_mask_workspace must hold {needed} int32 words for a mask of shape "
            f"{shape}, got {workspace.numel()}"
        )
    mask = workspace[:needed].view(shape)
    check_topk_mask_storage(mask, "topk_mask_workspace")
    return mask


@triton.jit(
    do_not_specialize=[
        "total_q",
        "mask_batch_stride",
        "mask_row_stride",
        "topk_stride",
        "num_words",
        "num_topk",
        "num_keys",
    ],
    do_not_specialize_on_alignment=[
        "topk_ptr",
        "cu_q_lens_ptr",
        "context_lens_ptr",
        "range_starts_ptr",
    ],
)
def _scatter_topk_kernel(
    mask_ptr,
    topk_ptr,
    cu_q_lens_ptr,
    context_lens_ptr,
    range_starts_ptr,
    total_q,
    mask_batch_stride,
    mask_row_stride,
    topk_stride,
    num_words,
    num_topk,
    num_keys,
    HAS_CONTEXT: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(rows, requests)``: one program writes one mask row.

    It clears the row, then sets the bits of its top-k. The barrier orders the clearing
    stores before the atomics, which other threads of the program may issue.
    """
    query = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    q_start = tl.load(cu_q_lens_ptr + request).to(tl.int64)
    q_end = tl.minimum(tl.load(cu_q_lens_ptr + request + 1), total_q).to(tl.int64)
    source_row = q_start + query
    topk_row_ptr = topk_ptr + source_row * topk_stride
    row_ptr = mask_ptr + request * mask_batch_stride + query * mask_row_stride
    last_key = query
    if HAS_CONTEXT:
        last_key += tl.load(context_lens_ptr + request)
    range_start = 0
    if HAS_RANGES:
        range_start = tl.load(range_starts_ptr + request)
    # Rows past the request's length have no top-k.
    num_topk = tl.where(source_row < q_end, num_topk, 0)

    offsets = tl.arange(0, BLOCK)
    for start in range(0, num_words, BLOCK):
        words = start + offsets
        tl.store(row_ptr + words, 0, mask=words < num_words)
    tl.debug_barrier()
    for start in range(0, num_topk, BLOCK):
        slots = start + offsets
        index = tl.load(topk_row_ptr + slots, mask=slots < num_topk, other=-1)
        inside = (index >= range_start) & (index <= last_key)
        key = tl.where(inside, index - range_start, num_keys)
        tl.atomic_or(
            row_ptr + (key >> 5),
            (1 << (key & 31)).to(tl.int32),
            mask=key < num_keys,
            sem="relaxed",
            scope="cta",
        )


def build_topk_mask_triton(
    topk: torch.Tensor,
    cu_q_lens: torch.Tensor,
    max_q_len: int,
    max_seq_len: int,
    out: torch.Tensor,
    context_lens: torch.Tensor | None = None,
    range_starts: torch.Tensor | None = None,
) -> None:
    """The Triton kernel; arguments as ``build_packed_topk_mask`` has checked them."""
    _scatter_topk_kernel[(max_q_len, cu_q_lens.shape[0] - 1)](
        out,
        topk,
        cu_q_lens,
        context_lens,
        range_starts,
        topk.shape[0],
        out.stride(0),
        out.stride(1),
        topk.stride(0),
        out.shape[2],
        topk.shape[1],
        max_seq_len,
        HAS_CONTEXT=context_lens is not None,
        HAS_RANGES=range_starts is not None,
        BLOCK=_SCATTER_BLOCK,
    )


@functools.cache
def _use_cutedsl_topk_mask(device_type: str) -> bool:
    """Whether the CuTe DSL kernel builds masks on this device; says so once.

    That is on an NVIDIA GPU; anywhere else, the interpreter included, Triton does.
    """
    if device_type != "cuda" or not current_platform.is_cuda():
        reason = f"{device_type} is not an NVIDIA GPU here"
    elif not has_cutedsl():
        reason = "the CuTe DSL is not installed"
    else:
        logger.info_once("Sparse MLA top-k masks are built by the CuTe DSL kernel.")
        return True
    logger.info_once("Sparse MLA top-k masks are built by Triton: %s.", reason)
    return False


def build_packed_topk_mask(
    topk: torch.Tensor,
    cu_q_lens: torch.Tensor,
    max_q_len: int,
    max_seq_len: int,
    out: torch.Tensor,
    *,
    context_lens: torch.Tensor | None = None,
    range_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Build the bit-packed causal masks of all requests in one launch.

    Row ``q`` of request ``b`` keeps its top-k keys up to ``context_lens[b] + q``. Reads
    nothing from the device on the host, and allocates nothing.

    Args:
        topk: int32 ``[tokens, topk]``, the requests' rows one after another; any
            order, duplicates and -1 anywhere. Row stride free, last stride 1.
        cu_q_lens: int32 ``[batch + 1]`` on the device, cumulative query lengths.
        max_q_len: Rows to write for each request; those past its length become 0.
        max_seq_len: Keys of a row; an index that would set a later bit is dropped.
        out: int32 ``[>= batch, >= max_q_len, words]``. Its storage is taken as checked
            by the caller: last stride 1, words a multiple of 4, base address and outer
            strides multiples of ``TOPK_MASK_ALIGN_BYTES``.
        context_lens: int32 ``[batch]`` on the device, keys before each request's first
            query; None if there are none.
        range_starts: int32 ``[batch]`` on the device, none negative. Key
            ``range_starts[b]`` becomes bit 0; earlier keys are dropped.

    Returns:
        ``out[:batch, :max_q_len]``, every word of it defined.

    Raises:
        ValueError: Before any launch, naming the argument.
    """
    batch_size = cu_q_lens.shape[0] - 1
    if topk.dtype != torch.int32 or topk.ndim != 2 or topk.stride(-1) != 1:
        raise ValueError(
            "topk must be int32 [tokens, topk] with last stride 1, got "
            f"{topk.dtype}, shape {tuple(topk.shape)}, strides {topk.stride()}"
        )
    if topk.device != out.device:
        raise ValueError(
            f"topk and out must be on one device, got {topk.device} and {out.device}"
        )
    needed = (batch_size, max_q_len, cdiv(max_seq_len, 32))
    if any(size > have for size, have in zip(needed, out.shape)):
        raise ValueError(
            f"out is too small: batch {batch_size}, max_q_len {max_q_len} and "
            f"max_seq_len {max_seq_len} need at least {needed} (requests, rows, "
            f"words), got {tuple(out.shape)}"
        )
    for name, tensor, size in (
        ("cu_q_lens", cu_q_lens, batch_size + 1),
        ("context_lens", context_lens, batch_size),
        ("range_starts", range_starts, batch_size),
    ):
        if tensor is not None and (
            tensor.dtype != torch.int32
            or tensor.shape != (size,)
            or tensor.stride(0) != 1
            or tensor.device != out.device
        ):
            raise ValueError(
                f"{name} must be contiguous int32 of shape ({size},) on {out.device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
    view = out[:batch_size, :max_q_len]
    if view.numel() == 0:
        return view
    if _use_cutedsl_topk_mask(out.device.type):
        from vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl import (
            TOPK_MASK_KERNEL,
        )

        TOPK_MASK_KERNEL(
            topk, cu_q_lens, max_q_len, max_seq_len, out, context_lens, range_starts
        )
    else:
        build_topk_mask_triton(
            topk, cu_q_lens, max_q_len, max_seq_len, out, context_lens, range_starts
        )
    return view

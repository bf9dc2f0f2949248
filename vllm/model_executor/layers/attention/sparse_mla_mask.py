# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Callbacks that read a bit-packed top-k mask inside FlashAttention-4.

A mask is an int32 tensor ``[batch, query, word]``: bit ``j`` of word ``i`` of row
``(b, q)`` is 1 iff query ``q`` of request ``b`` attends to key ``32 * i + j``. FA4
calls a ``mask_mod`` once per row and group of ``__vec_size__`` consecutive columns;
of the index vectors that it passes, lane 0 names the row and the first column. The
answer is one Uint32 keep word per 32 columns, lowest column in the lowest bit.

Storage: the base address and both outer strides are multiples of
``TOPK_MASK_ALIGN_BYTES`` and a row holds a multiple of four words.
``check_topk_mask_storage`` refuses anything else before a launch, and the loads here
promise exactly that to the compiler. The promise has to be made on the pointer: FA4
passes aux tensors with their natural four-byte alignment, and stride divisibility
alone leaves four 32-bit loads.
"""

import hashlib
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from vllm.model_executor.kernels.attention.dsa.topk_mask import TOPK_MASK_ALIGN_BYTES
from vllm.vllm_flash_attn.cute import utils

_GROUP_WORDS = 4  # 128 keys


def _file_hash(name: str) -> str:
    """What FA4 is to know a callback by, in memory and in its kernel cache on disk.

    Left to itself FA4 hashes a callback's own source, and none of what it calls.
    """
    digest = hashlib.sha256(f"{name} {TOPK_MASK_ALIGN_BYTES} ".encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


@cute.jit
def _load_group(mask: cute.Tensor, batch_idx: Int32, query_idx: Int32, word: Int32):
    """Load words ``[word, word + 4)`` of a mask row."""
    # The address is summed in bytes: indexed through the tensor, the 256/256 kernel
    # comes out longer.
    offset = Int64(cute.crd2idx((batch_idx, query_idx, word), mask.layout))
    pointer = cute.make_ptr(
        Int32,
        mask.iterator.toint() + offset * 4,
        mask.memspace,
        assumed_align=TOPK_MASK_ALIGN_BYTES,
    )
    source = cute.make_tensor(pointer, cute.make_layout(_GROUP_WORDS))
    words = cute.make_rmem_tensor_like(source)
    cute.autovec_copy(source, words)
    return cute.recast_tensor(words, Uint32)


@cute.jit
def dense_mask_mod(
    batch: cute.TensorSSA,
    head: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    seqlen_info,
    aux_tensors: list,
) -> cute.TensorSSA:
    """Keep words of 128 columns, column ``k`` being key ``k``; one 16-byte load.

    The first column must be a multiple of 128 (``__column_alignment__``);
    ``aux_tensors`` is ``[mask]``.
    """
    words = _load_group(
        aux_tensors[0],
        utils.ssa_to_scalar(batch),
        utils.ssa_to_scalar(q_idx),
        utils.ssa_to_scalar(kv_idx) >> 5,
    )
    return words.load()


dense_mask_mod.__vec_size__ = 128
dense_mask_mod.__column_alignment__ = 128
dense_mask_mod.__cute_hash__ = _file_hash("dense_mask_mod")


@cute.jit
def offset_dense_mask_mod(
    batch: cute.TensorSSA,
    head: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    seqlen_info,
    aux_tensors: list,
) -> cute.TensorSSA:
    """Keep words of 128 columns, column ``k`` being key ``key_start + k``.

    Exact for every ``key_start`` and first column: the two 16-byte groups that the
    128 keys can span are loaded, and the wanted words shifted out of them. The second
    group is clamped to the row; what it then holds belongs to no key.

    ``aux_tensors`` is ``[mask]``, where request ``b``'s ``key_start`` is the last word
    of its row 0, or ``[mask, key_starts]`` with int32 ``key_starts`` of shape
    ``[batch]``, which leaves the mask untouched between calls.
    """
    mask = aux_tensors[0]
    batch_idx = utils.ssa_to_scalar(batch)
    query_idx = utils.ssa_to_scalar(q_idx)
    if const_expr(len(aux_tensors) > 1):
        key_start = aux_tensors[1][batch_idx]
    else:
        key_start = mask[batch_idx, 0, mask.shape[2] - 1]
    key = utils.ssa_to_scalar(kv_idx) + key_start

    last_group = Int32(mask.shape[2] // _GROUP_WORDS - 1)
    group = cutlass.min(key >> 7, last_group)
    low = _load_group(mask, batch_idx, query_idx, group * _GROUP_WORDS)
    next_group = cutlass.min((key + 128) >> 7, last_group)
    high = _load_group(mask, batch_idx, query_idx, next_group * _GROUP_WORDS)

    # Shift the eight words right by `key % 128` bits: by two words, by one word, then
    # by bits across each pair of neighbours. Every register index is a constant.
    skip_two = (key & 64) != 0
    skip_one = (key & 32) != 0
    words = [low[i] for i in range(4)] + [high[i] for i in range(4)]
    words = [words[i + 2] if skip_two else words[i] for i in range(6)]
    words = [words[i + 1] if skip_one else words[i] for i in range(5)]
    keep = cute.make_rmem_tensor(_GROUP_WORDS, dtype=Uint32)
    for i in cutlass.range_constexpr(_GROUP_WORDS):
        keep[i] = cute.arch.shf(words[i], words[i + 1], key & 31, "r")
    return keep.load()


offset_dense_mask_mod.__vec_size__ = 128
offset_dense_mask_mod.__column_alignment__ = 1
offset_dense_mask_mod.__cute_hash__ = _file_hash("offset_dense_mask_mod")

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Callbacks that read the packed mask one word a call: baselines, not for serving.

Needs CUTLASS and ``vllm.vllm_flash_attn.cute``; see ``flash_attn_stub`` for a machine
without libcuda.
"""

import cutlass
import cutlass.cute as cute

from vllm.vllm_flash_attn.cute import utils


@cute.jit
def word_mask_mod(
    batch: cute.TensorSSA,
    head: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    seqlen_info,
    aux_tensors: list,
) -> cute.TensorSSA:
    """The mask word of 32 consecutive keys: what upstream's 32-bit mask does."""
    row = (utils.ssa_to_scalar(batch), utils.ssa_to_scalar(q_idx))
    words = cute.make_rmem_tensor(1, dtype=cutlass.Uint32)
    words[0] = cutlass.Uint32(aux_tensors[0][(*row, utils.ssa_to_scalar(kv_idx) >> 5)])
    return words.load()


word_mask_mod.__vec_size__ = 32


@cute.jit
def scalar_mask_mod(
    batch: cute.TensorSSA,
    head: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    seqlen_info,
    aux_tensors: list,
) -> cute.TensorSSA:
    """One key a call, which is all that stock FA4 supports on SM90."""
    row = (utils.ssa_to_scalar(batch), utils.ssa_to_scalar(q_idx))
    key = utils.ssa_to_scalar(kv_idx)
    word = cutlass.Uint32(aux_tensors[0][(*row, key >> 5)])
    bit = utils.shr_u32(word, cutlass.Uint32(key & 31)) & cutlass.Uint32(1)
    return utils.scalar_to_ssa(bit != 0, cutlass.Boolean)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vectorised mask callbacks inside FA4's SM90 forward kernel.

Upstream's ``AttentionMask.apply_mask`` calls a ``mask_mod`` once per score, and drops
it without a word under ``causal=True``. ``apply_mask_mod_sm90_vector`` calls a
vectorised one once per row and group of keys, and applies its words with bit tests at
compile-time positions. The kernel passes it all that it needs (``edits``).

Contract of such a callback:

- Bit ``j`` of word ``i`` of a call whose first column is ``c`` keeps key
  ``c + 32 * i + j``. ``__column_alignment__`` says which first columns it is exact
  for: a power of two up to ``__vec_size__``, which it is if unset.
- Only rows that hold a query, and groups of columns that hold a key, are asked for (of
  a request without keys: its first group).
- ``causal=True`` and the callback both apply.

Everything else goes to upstream's definition, except a callback that this would
silently ignore: that raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, select_
from quack import layout_utils

from vllm.vllm_flash_attn.cute import _upstream_mask as _upstream
from vllm.vllm_flash_attn.cute import utils
from vllm.vllm_flash_attn.cute.utils import AuxData

# Taken before the loader points upstream's module at the class below.
_UpstreamAttentionMask = _upstream.AttentionMask


def call_vector_mask_mod(
    mask_mod, vec_size, batch_idx, head_idx, row, col, *, seqlen_info, aux_data
):
    """Keep words of the ``max(vec_size, 32)`` keys from ``col``, of one row."""
    batch_idx, head_idx, row = (
        utils.scalar_to_ssa(i, Int32).broadcast_to((vec_size,))
        for i in (batch_idx, head_idx, row)
    )
    words = []
    for first in range(0, max(vec_size, 32), vec_size):
        cols = cute.make_rmem_tensor(vec_size, Int32)
        for i in range(vec_size):
            cols[i] = col + (first + i)
        keep = _upstream.call_mask_mod(
            mask_mod, batch_idx, head_idx, row, cols.load(), seqlen_info, aux_data
        )
        words += [Uint32(keep[i]) for i in range(max(vec_size // 32, 1))]
    if vec_size >= 32:
        return words
    word = Uint32(0)
    for i, part in enumerate(words):
        word |= (part & Uint32((1 << vec_size) - 1)) << Uint32(i * vec_size)
    return [word]


def shift_words_right(words, shift, limit, num_words):
    """First ``num_words`` words of ``words >> shift``, ``shift`` below ``limit``.

    ``limit`` is a power of two. Every register index is a compile-time constant: the
    shift goes by words, halving the step, and then by bits across each pair of
    neighbours.
    """
    words = words + [Uint32(0)] * (num_words + limit // 32 - len(words))
    step = limit // 64
    while step:
        skip = (shift & (32 * step)) != 0
        words = [
            Uint32(select_(skip, far, near)) for near, far in zip(words, words[step:])
        ]
        step //= 2
    return [
        cute.arch.shf(low, high, shift & 31, "r")
        for low, high in zip(words[:num_words], words[1:])
    ]


@dataclass(frozen=True)
class AttentionMask(_UpstreamAttentionMask):
    """Upstream's mask with a branch for vectorised callbacks in ``apply_mask``."""

    def apply_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx: Int32,
        head_idx: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr[Callable | None] = None,
        aux_data: AuxData = AuxData(),  # noqa: B008
        fastdiv_mods=(None, None),
        vec_size: cutlass.Constexpr[int] = 1,
        words_ahead: cute.Tensor | None = None,
    ) -> None:
        """Mask one tile of scores in place.

        Raises:
            NotImplementedError: At trace time, for a mask_mod that would be ignored or
                misread here.
        """
        is_vector = mask_mod is not None and vec_size > 1
        is_dynamic = getattr(self, "dynamic_causal", None) is not None
        misuses = (
            ("swapped operands", is_vector and self.swap_AB),
            ("causal=True", mask_causal and not is_vector),
            ("dynamic_causal", is_vector and is_dynamic),
            ("a window", mask_local),
            ("calls for one score", getattr(mask_mod, "__vec_size__", 1) != vec_size),
        )
        for what, is_one in misuses:
            if mask_mod is not None and is_one:
                raise NotImplementedError(
                    f"mask_mod {getattr(mask_mod, '__name__', mask_mod)} does not "
                    f"support {what} in this kernel"
                )
        if is_vector:
            self.apply_mask_mod_sm90_vector(
                acc_S,
                batch_idx,
                head_idx,
                m_block,
                n_block,
                thr_mma,
                mask_seqlen,
                mask_causal,
                mask_mod,
                vec_size,
                aux_data,
                words_ahead,
            )
            return
        _UpstreamAttentionMask.apply_mask(
            self,
            acc_S,
            batch_idx,
            head_idx,
            m_block,
            n_block,
            thr_mma,
            mask_seqlen,
            mask_causal,
            mask_local,
            mask_mod,
            aux_data,
            fastdiv_mods,
        )

    def make_words_ahead(self, thr_mma: cute.TiledMma) -> cute.Tensor:
        """Registers for the mask words of the next block's rows, of one thread."""
        cS = cute.make_identity_tensor((self.tile_m, self.tile_n))
        tScS_mn = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(cS))
        num_words = -(-self.tile_n // 32)
        return cute.make_rmem_tensor((cute.size(tScS_mn.shape[0]), num_words), Uint32)

    @cute.jit
    def apply_mask_mod_sm90_vector(
        self,
        acc_S: cute.Tensor,
        batch_idx: Int32,
        head_idx: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_mod: cutlass.Constexpr[Callable],
        vec_size: cutlass.Constexpr[int],
        aux_data: AuxData,
        words_ahead: cute.Tensor | None,
    ) -> None:
        """Apply a vectorised mask_mod to an SM90 accumulator.

        mask_mod is called once per row and vec_size adjacent keys and returns
        bit-packed Uint32 keep words, lowest key in the lowest bit. Its first columns
        are multiples of mask_mod.__column_alignment__, of vec_size (at least 32) if
        it has none.

        With words_ahead (of make_words_ahead, one for a row tile) the calls of a tile
        are those of key blocks downwards, one by one, the first with mask_seqlen. Each
        loads the words of the block below its own, a whole matrix product before they
        are needed: loaded at their use, they would hold up the softmax by an L2
        latency a block.
        """
        group = const_expr(max(vec_size, 32))
        alignment = const_expr(getattr(mask_mod, "__column_alignment__", group))
        for what, size in (("vec_size", vec_size), ("column alignment", alignment)):
            if const_expr(size & (size - 1) or size > group):
                raise ValueError(
                    f"{what} of mask_mod must be a power of two, and no alignment "
                    f"above {group}, got {size}"
                )
        acc_S_mn = layout_utils.reshape_acc_to_mn(acc_S)
        cS = cute.make_identity_tensor((self.tile_m, self.tile_n))
        tScS_mn = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(cS))
        # Thread 0's coordinates are known at compile time; a thread's own columns
        # are those plus its offset in the quad.
        t0ScS_mn = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(cS))
        thr_col_offset = tScS_mn[0][1]
        num_rows = const_expr(cute.size(tScS_mn.shape[0]))
        num_words = const_expr(-(-self.tile_n // 32))
        queries = [
            self._head_and_query(head_idx, m_block * self.tile_m + tScS_mn[r, 0][0])
            for r in range(num_rows)
        ]
        load = partial(
            self._load_words,
            queries,
            partial(
                call_vector_mask_mod,
                mask_mod,
                vec_size,
                batch_idx,
                seqlen_info=self.seqlen_info,
                aux_data=aux_data,
            ),
            group,
            alignment,
        )
        # FA4 visits block -1 where a row tile has no key block at all.
        block = cutlass.max(n_block, 0)
        words = cute.make_rmem_tensor((num_rows, num_words), Uint32)
        if const_expr(words_ahead is None):
            load(block, words)
        else:
            # Nothing was loaded ahead for a tile's first block: it goes round twice.
            for i in cutlass.range(0 if mask_seqlen else 1, 2, unroll=1):
                words.store(words_ahead.load())
                load(cutlass.max(block - i, 0), words_ahead)

        num_keys = self.seqlen_k - block * self.tile_n
        for r in cutlass.range_constexpr(num_rows):
            for i in cutlass.range_constexpr(num_words):
                word = words[r, i]
                if const_expr(mask_seqlen):
                    word = word & _upstream.r2p_bitmask_below(num_keys, i)
                if const_expr(mask_causal):
                    last = queries[r][1] + num_keys - self.seqlen_q
                    word = word & _upstream.r2p_bitmask_below(last + 1, i)
                words[r, i] = word >> Uint32(thr_col_offset)
            for c in cutlass.range_constexpr(cute.size(tScS_mn.shape[1])):
                col = const_expr(t0ScS_mn[0, c][1])
                keep = Boolean(words[r, col // 32] & Uint32(1 << (col % 32)))
                acc_S_mn[r, c] = acc_S_mn[r, c] if keep else -Float32.inf

    def _head_and_query(self, head_idx, row):
        """Head and query of a row, the last query's for rows past it."""
        num_heads = self.qhead_per_kvhead_packgqa
        if num_heads != 1:
            head_idx, row = head_idx * num_heads + row % num_heads, row // num_heads
        return head_idx, cutlass.min(row, self.seqlen_q - 1)

    def _load_words(self, queries, call, group, alignment, block, out):
        """Load the words of a block's rows, column 0 of the block in bit 0."""
        for r, query in enumerate(queries):
            words = self._tile_words(
                partial(call, *query), group, alignment, block * self.tile_n
            )
            for i, word in enumerate(words):
                out[r, i] = word

    def _tile_words(self, call, group, alignment, first_col):
        """Keep words of one row of a tile, column ``first_col`` in bit 0."""
        num_words = -(-self.tile_n // 32)
        max_misalignment = alignment - gcd(self.tile_n, alignment)
        words = call(first_col & -alignment)
        for g in range(1, -(-(max_misalignment + self.tile_n) // group)):
            col = (first_col + g * group) & -alignment
            # A group past the last key belongs to no key; it may lie past the row.
            last_group = cutlass.max(self.seqlen_k - 1, 0) & -alignment
            words += call(cutlass.min(col, last_group))
        if max_misalignment == 0:
            return words[:num_words]
        shift = first_col & (alignment - 1)
        return shift_words_right(words, shift, alignment, num_words)

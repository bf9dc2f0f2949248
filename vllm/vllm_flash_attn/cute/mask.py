# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bit-packed mask callbacks inside FA4's SM90 forward kernel.

Upstream's ``AttentionMask.apply_mask`` calls a ``mask_mod`` once per score and
drops it without a word under ``causal=True``. This module adds one branch that is
taken first when the callback is a front made by ``packed_mask_front``: the packed
callback is called once per row and group of 128 keys, and its words are applied
with bit tests at compile-time positions.

Contract of the packed branch:

- Bit ``j`` of word ``i`` of a call whose first column is ``c`` keeps key
  ``c + 32 * i + j``. ``__column_alignment__`` of the callback says which first
  columns it is exact for (a multiple of 1 or of 128).
- ``causal=True`` only narrows the range of key blocks that FA4 visits. Inside those
  blocks the mask alone decides, so it must itself be causal, as a top-k mask is.
- Mask storage has its rows padded to a multiple of 128 and a row tile's height
  divides 128, so every row of a tile lies inside the storage, also those past a
  request's last query.
- Only groups of 128 columns that hold a valid key are asked for (a request without
  keys: its first group), so a row of whole 16-byte groups is never overrun.

Everything else goes to upstream's definition, except a callback that upstream would
silently ignore (causal or windowed attention): that raises. FA4's persistent kernel
cache, off by default, is keyed by upstream's sources and by the callback's hash;
the front's hash covers this file, so a kernel with the packed branch is never taken
for another. A kernel that stock FA4 cached for an ignored callback is found there
before anything is traced, so it does not raise.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, select_
from quack import layout_utils

from vllm.vllm_flash_attn.cute import _upstream_mask as _upstream
from vllm.vllm_flash_attn.cute import utils
from vllm.vllm_flash_attn.cute.utils import AuxData

# Taken before the loader points upstream's module at the class below.
_UpstreamAttentionMask = _upstream.AttentionMask

PACKED_VEC_SIZE = 128
_WORDS_PER_CALL = PACKED_VEC_SIZE // 32


@functools.cache
def packed_mask_front(mask_mod: Callable) -> Callable:
    """Return what to hand to FA4 as ``mask_mod`` on SM90 for a packed callback.

    FA4 refuses ``__vec_size__`` above 1 on SM90 and keys its compilation caches by
    a hash of the callback. The front has no ``__vec_size__`` and a hash of its own,
    made from the callback's hash and this file.

    Args:
        mask_mod: Callback with ``__vec_size__ == 128`` and ``__column_alignment__``
            1 or 128 that returns four Uint32 words.

    Returns:
        The front, one object per callback. FA4 never calls it.

    Raises:
        ValueError: If ``mask_mod`` is not such a callback.
    """
    vec_size = getattr(mask_mod, "__vec_size__", 1)
    if vec_size != PACKED_VEC_SIZE:
        raise ValueError(
            f"mask_mod must have __vec_size__ == {PACKED_VEC_SIZE} to be packed on "
            f"SM90, got {vec_size}"
        )
    alignment = getattr(mask_mod, "__column_alignment__", None)
    if alignment not in (1, PACKED_VEC_SIZE):
        raise ValueError(
            f"mask_mod must have __column_alignment__ 1 or {PACKED_VEC_SIZE} to be "
            f"packed on SM90, got {alignment}"
        )

    def front(*args):
        raise RuntimeError(
            "a packed mask front was called key by key: this FA4 has no packed "
            "branch for SM90"
        )

    digest = hashlib.sha256(b"packed mask front")
    digest.update(utils.hash_callable(mask_mod).encode())
    digest.update(Path(__file__).read_bytes())
    name = getattr(mask_mod, "__name__", "mask_mod")
    front.__name__ = front.__qualname__ = f"packed_{name}"
    front.__packed_mask_mod__ = mask_mod
    front.__cute_hash__ = digest.hexdigest()
    return front


def _call_packed(mask_mod, batch_idx, head_idx, row, col, *, seqlen_info, aux_data):
    """Call a packed callback for 128 keys from ``col``; its four words."""
    indices = (utils.scalar_to_ssa(i, Int32) for i in (batch_idx, head_idx, row, col))
    keep = _upstream.call_mask_mod(mask_mod, *indices, seqlen_info, aux_data)
    return [keep[i] for i in range(_WORDS_PER_CALL)]


def _shift_words_right(words, shift, num_words):
    """First ``num_words`` words of ``words >> shift``, ``shift`` below 128.

    Every register index is a compile-time constant: the shift goes by two words, by
    one word and then by bits across each pair of neighbours.
    """
    words = words + [Uint32(0)] * (num_words + 4 - len(words))
    for step in (2, 1):
        skip = (shift & (32 * step)) != 0
        words = [
            Uint32(select_(skip, far, near)) for near, far in zip(words, words[step:])
        ]
    return [
        cute.arch.shf(low, high, shift & 31, "r")
        for low, high in zip(words[:num_words], words[1:])
    ]


@dataclass(frozen=True)
class AttentionMask(_UpstreamAttentionMask):
    """Upstream's mask with a branch for packed callbacks in ``apply_mask``."""

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
        aux_data: AuxData = AuxData(),  # noqa: B008 (upstream's signature)
        fastdiv_mods=(None, None),
    ) -> None:
        """Mask one tile of scores in place; arguments as upstream's.

        Raises:
            NotImplementedError: At trace time, for a packed callback with PackGQA,
                swapped operands or a window, and for any other callback under
                causal or windowed attention.
        """
        packed_mod = getattr(mask_mod, "__packed_mask_mod__", None)
        if packed_mod is not None:
            unsupported = (
                ("pack_gqa", self.qhead_per_kvhead_packgqa != 1),
                ("swap_AB", self.swap_AB),
                ("a window", mask_local),
                ("dynamic_causal", self.dynamic_causal is not None),
                ("a row tile that does not divide 128", 128 % self.tile_m != 0),
            )
            for what, is_used in unsupported:
                if is_used:
                    raise NotImplementedError(
                        f"the packed mask callback {mask_mod.__name__} does not "
                        f"support {what}"
                    )
            if mask_seqlen:
                # A row tile's first call, outside FA4's loops over key blocks: what
                # is made here is visible to every later call of the tile.
                ahead = self._make_words_ahead(acc_S)
                object.__setattr__(self, "_words_ahead", ahead)
            self._apply_packed_mask(
                acc_S,
                batch_idx,
                head_idx,
                m_block,
                n_block,
                thr_mma,
                mask_seqlen,
                packed_mod,
                aux_data,
                self._words_ahead,
            )
            return
        if hasattr(self, "_words_ahead"):
            # Only block sparsity calls without the callback after a call with it; its
            # blocks come in an order of their own.
            raise NotImplementedError(
                "a packed mask callback does not support block sparsity on SM90"
            )
        if mask_mod is not None and (mask_causal or mask_local):
            raise NotImplementedError(
                f"FA4 would ignore mask_mod {getattr(mask_mod, '__name__', mask_mod)} "
                "with causal=True or a window on this architecture; only a packed "
                "callback (packed_mask_front) is applied there"
            )
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

    def _make_words_ahead(self, acc_S: cute.Tensor):
        """Registers for the mask words of the next block's rows."""
        num_rows = cute.size(layout_utils.reshape_acc_to_mn(acc_S).shape[0])
        return cute.make_rmem_tensor((num_rows, -(-self.tile_n // 32)), Uint32)

    @cute.jit
    def _apply_packed_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx: Int32,
        head_idx: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        packed_mod: cutlass.Constexpr[Callable],
        aux_data: AuxData,
        words_ahead: cute.Tensor,
    ) -> None:
        """Set the scores of cleared bits and of keys past the end to -inf.

        FA4 walks key blocks downwards. The words of block ``n_block - 1`` are loaded
        here, a whole matrix product before they are needed: loaded at their use, they
        would hold up the softmax by an L2 latency a block.
        """
        acc_S_mn = layout_utils.reshape_acc_to_mn(acc_S)
        cS = cute.make_identity_tensor((self.tile_m, self.tile_n))
        tScS_mn = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(cS))
        # Thread 0's coordinates are known at compile time; a thread's own columns
        # are those plus its offset in the quad.
        t0ScS_mn = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(cS))
        thr_col_offset = tScS_mn[0][1]
        num_rows = const_expr(cute.size(tScS_mn.shape[0]))
        num_words = const_expr(-(-self.tile_n // 32))
        load = partial(
            self._load_words,
            words_ahead,
            [m_block * self.tile_m + tScS_mn[r, 0][0] for r in range(num_rows)],
            partial(
                _call_packed,
                packed_mod,
                batch_idx,
                head_idx,
                seqlen_info=self.seqlen_info,
                aux_data=aux_data,
            ),
            packed_mod.__column_alignment__,
        )
        # FA4 visits block -1 where a row tile has no key block at all.
        block = cutlass.max(n_block, 0)
        words = cute.make_rmem_tensor_like(words_ahead)
        # Nothing was loaded ahead for a row tile's first block: it goes round twice.
        for i in cutlass.range(0 if mask_seqlen else 1, 2, unroll=1):
            words.store(words_ahead.load())
            load(cutlass.max(block - i, 0))

        col_limit = self.seqlen_k - block * self.tile_n
        for r in cutlass.range_constexpr(num_rows):
            for i in cutlass.range_constexpr(num_words):
                word = words[r, i]
                if const_expr(mask_seqlen):
                    word = word & _upstream.r2p_bitmask_below(col_limit, i)
                words[r, i] = word >> Uint32(thr_col_offset)
            for c in cutlass.range_constexpr(cute.size(tScS_mn.shape[1])):
                col = const_expr(t0ScS_mn[0, c][1])
                keep = Boolean(words[r, col // 32] & Uint32(1 << (col % 32)))
                acc_S_mn[r, c] = acc_S_mn[r, c] if keep else -Float32.inf

    def _load_words(self, words_ahead, rows, call, alignment, block):
        """Load the words of a block's rows, column 0 of the block in bit 0."""
        for r, row in enumerate(rows):
            words = self._tile_words(partial(call, row), alignment, block * self.tile_n)
            for i, word in enumerate(words):
                words_ahead[r, i] = word

    def _tile_words(self, call, alignment, first_col):
        """Keep words of one row of a tile, column ``first_col`` in bit 0."""
        num_words = -(-self.tile_n // 32)
        max_misalignment = alignment - gcd(self.tile_n, alignment)
        words = call(first_col & -alignment)
        for g in range(1, -(-(max_misalignment + self.tile_n) // PACKED_VEC_SIZE)):
            col = (first_col + g * PACKED_VEC_SIZE) & -alignment
            # A group past the last key belongs to no key; it may lie past the row.
            last_group = cutlass.max(self.seqlen_k - 1, 0) & -alignment
            words += call(cutlass.min(col, last_group))
        if max_misalignment == 0:
            return words[:num_words]
        return _shift_words_right(words, first_col & (alignment - 1), num_words)

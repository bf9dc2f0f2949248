# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Top-k rows, and the packed masks that they mean."""

from collections.abc import Sequence

import numpy as np
import torch

CANARY = 0x5A5A5A5A
PADDING = 64  # canary words on each side of a mask, a multiple of 16 bytes
_ROWS_AT_ONCE = 1024


def causal_topk(length: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Rows as an indexer emits them: keys up to the query by score, then -1.

    Args:
        length: queries, of which the first is the sequence's first token.
        topk: keys to keep.
        generator: of the scores; its device is the rows' device.

    Returns:
        int32 `[length, topk]`.
    """
    device = generator.device
    parts = [torch.empty(0, topk, dtype=torch.int32, device=device)]
    for queries in torch.arange(length, device=device).split(_ROWS_AT_ONCE):
        width = max(int(queries[-1]) + 1, topk)
        keys = torch.arange(width, device=device)
        scores = torch.rand(len(queries), width, generator=generator, device=device)
        scores[keys > queries[:, None]] = -1.0
        best = scores.topk(topk, dim=-1)
        parts.append(best.indices.where(best.values >= 0, -1).int())
    return torch.cat(parts)


def pack(grid: np.ndarray) -> torch.Tensor:
    """Pack bool `[..., 32 * words]` into int32 `[..., words]`, key 0 in bit 0."""
    words = np.packbits(grid, axis=-1, bitorder="little").view(np.int32)
    return torch.from_numpy(words.copy())


def expected_mask(
    topk: torch.Tensor,
    q_lens: Sequence[int],
    rows: int,
    num_keys: int,
    num_words: int,
    context_lens: Sequence[int] | None = None,
    range_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """The mask of top-k rows, from a boolean grid: no kernel's arithmetic.

    Args:
        topk: int `[queries, topk]`, the rows of all requests.
        q_lens: queries of each request.
        rows: of each request in the mask.
        num_keys: keys of a row; others are dropped.
        num_words: words of a row.
        context_lens: tokens before each request's queries: keys after a query are
            dropped. None drops none.
        range_starts: the key in bit 0 of each request's rows; None is key 0.

    Returns:
        int32 `[requests, rows, num_words]`, on the CPU.
    """
    grid = np.zeros((len(q_lens), rows, num_words * 32), dtype=bool)
    tokens = iter(topk.cpu().numpy().astype(np.int64))
    for request, q_len in enumerate(q_lens):
        start = 0 if range_starts is None else range_starts[request]
        for row, keys in zip(range(q_len), tokens):
            if context_lens is not None:
                keys = keys[keys <= context_lens[request] + row]
            keys = keys[keys >= 0] - start
            grid[request, row, keys[(keys >= 0) & (keys < num_keys)]] = True
    return pack(grid)


class GuardedMask:
    """Storage of a mask, full of ones, between words that nobody may write.

    Attributes:
        words: int32 `[numel]`, the storage.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._guarded = torch.full(
            (numel + 2 * PADDING,), CANARY, dtype=torch.int32, device=device
        )
        self.words = self._guarded[PADDING : PADDING + numel]
        self.poison()

    def poison(self) -> None:
        """Set every bit."""
        self.words.fill_(-1)

    def assert_canaries(self) -> None:
        """Fails if a word beside the storage was written."""
        zones = (self._guarded[:PADDING], self._guarded[-PADDING:])
        assert (torch.cat(zones) == CANARY).all(), "written beside the mask"

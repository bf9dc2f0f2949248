# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Top-k rows, and the packed masks that they mean."""

import itertools
import math
from collections.abc import Callable, Sequence

import torch

CANARY = 0x5A5A5A5A
PADDING = 64  # canary words on each side of a mask, a multiple of 16 bytes
_ROWS_AT_ONCE = 1024


def causal_topk(length: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Rows as an indexer emits them: keys up to the query by score, then -1.

    The first query is the sequence's first token; int32 `[length, topk]`, where the
    generator of the scores is.
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


def random_topk(
    rows: int,
    topk: int,
    num_keys: int,
    *,
    seed: int = 0,
    hostile: bool = False,
    offset: int = 0,
    padding: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Rows with duplicates, and -1 anywhere: int32 `[rows, topk]`.

    Hostile rows have indices out of range too, the largest and the smallest among
    them. Offset and padding are columns of the storage before and after the rows'.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (rows, offset + topk + padding)
    index = torch.randint(num_keys, shape, generator=generator, device=device)
    kind = torch.randint(12, shape, generator=generator, device=device)
    index[kind == 0] = -1
    if hostile:
        values = (num_keys, num_keys + 33, 2**31 - 1, -(2**31), -2)
        for code, value in enumerate(values, start=1):
            index[kind == code] = value
    return index.int()[:, offset : offset + topk]


def pack(grid: torch.Tensor) -> torch.Tensor:
    """Pack bool `[..., 32 * words]` into int32 `[..., words]`, key 0 in bit 0."""
    weights = 1 << torch.arange(32, device=grid.device)
    return (grid.unflatten(-1, (-1, 32)) * weights).sum(-1).int()


def expected_mask(
    topk: torch.Tensor,
    q_lens: Sequence[int],
    rows: int,
    num_keys: int,
    num_words: int,
    context_lens: Sequence[int] | None = None,
    range_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """The mask of top-k rows, from boolean grids: no kernel's arithmetic.

    Args:
        topk: int `[>= queries, topk]`, rows of all requests in turn.
        q_lens: queries of each request.
        rows: of each request in the mask.
        num_keys: keys of a row; others are dropped.
        num_words: words of a row.
        context_lens: tokens before each request's queries: keys after a query are
            dropped. None drops none.
        range_starts: the key in bit 0 of each request's rows; None is key 0.

    Returns:
        int32 `[requests, rows, num_words]`.
    """
    mask = topk.new_zeros(len(q_lens), rows, num_words)
    rows_of = topk[: sum(q_lens)].long().split(list(q_lens))
    for request, tokens in enumerate(rows_of):
        start = 0 if range_starts is None else range_starts[request]
        queries = torch.arange(len(tokens), device=topk.device)
        for part in queries.split(_ROWS_AT_ONCE):
            keys = tokens[part]
            if context_lens is not None:
                keys = keys.where(keys <= context_lens[request] + part[:, None], -1)
            places = keys - start
            kept = (keys >= 0) & (places >= 0) & (places < num_keys)
            # What is dropped goes to a column of its own.
            grid = kept.new_zeros(len(part), 32 * num_words + 1)
            grid.scatter_(1, places.where(kept, 32 * num_words), True)
            mask[request, part] = pack(grid[:, :-1])
    return mask


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


class MaskCall:
    """A call of a mask builder, whose storage is full of words that it shall replace.

    Attributes:
        arguments: what every builder takes, `out` and its optional vectors included.
        view: the part of `out` that the call has to write.
    """

    def __init__(
        self,
        topk: torch.Tensor,
        q_lens: Sequence[int],
        max_q_len: int,
        num_keys: int,
        context_lens: Sequence[int] | None = None,
        range_starts: Sequence[int] | None = None,
        spare: tuple[int, int, int] = (1, 0, 0),
    ) -> None:
        """Prepare a call.

        Args:
            topk: int32 `[>= queries, topk]`, rows of all requests in turn.
            q_lens: queries of each request.
            max_q_len: rows to write for each request.
            num_keys: keys of a row.
            context_lens: tokens before each request's queries; None is none.
            range_starts: the key in bit 0 of each request's rows; None is key 0.
            spare: requests, rows and words of the storage beyond the mask's.
        """
        from vllm.model_executor.layers.attention.sparse_mla_attention import (
            _topk_mask_shape,
        )

        def vector(values: Sequence[int] | None) -> torch.Tensor | None:
            if values is not None:
                return torch.tensor(values, dtype=torch.int32, device=topk.device)
            return None

        shape = _topk_mask_shape(len(q_lens), max_q_len, num_keys)
        whole = [size + more for size, more in zip(shape, spare)]
        self._storage = torch.empty(
            math.prod(whole) + 2 * PADDING, dtype=torch.int32, device=topk.device
        )
        out = self._storage[PADDING:-PADDING].view(whole)[..., : shape[2]]
        self.view = out[: len(q_lens), :max_q_len]
        self.poison()
        cu_q_lens = vector([0, *itertools.accumulate(q_lens)])
        sizes = (cu_q_lens, max_q_len, num_keys, out)
        self.arguments = (topk, *sizes, vector(context_lens), vector(range_starts))
        self._expected = (context_lens or [0] * len(q_lens), range_starts)
        self._q_lens = q_lens

    def poison(self) -> None:
        """Fill the storage anew."""
        self._storage.fill_(CANARY)

    def build(self, builder: Callable[..., object]) -> torch.Tensor:
        """Call a builder: the view."""
        builder(*self.arguments)
        return self.view

    def words(self, builder: Callable[..., object]) -> torch.Tensor:
        """What a builder writes; fails if it writes outside the view."""
        found = self.build(builder).clone()
        self.view.fill_(CANARY)
        assert (self._storage == CANARY).all(), "a word outside the view changed"
        return found

    def expected(self) -> torch.Tensor:
        """The view's words, see `expected_mask`."""
        topk, _, max_q_len, num_keys, out, *_ = self.arguments
        return expected_mask(
            topk, self._q_lens, max_q_len, num_keys, out.shape[2], *self._expected
        )

    def check(self, builder: Callable[..., object]) -> None:
        """Fails if a builder writes anything but the expected words."""
        # Built before the expectation, so that no recycled memory holds the answer.
        found = self.words(builder)
        assert torch.equal(found, self.expected())

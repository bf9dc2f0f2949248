# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cases of masked attention: what the words of ``--shapes`` mean, and their tensors.

A word is ``REQUESTSxQUERIESxKEYS/HEADS/MASK``, queries and keys counted over all
requests, then any of ``/causal``, ``/offset`` and ``/256``. Several requests are of
unequal length. Dimensions are 192/128, or 256/256 with ``/256``. With ``/offset`` the
mask begins `KEY_START` keys before the keys that are attended to. Masks:

- ``ones``: every key, under ``/causal`` every key up to the query;
- ``uniform``: 2048 keys spread evenly over those that ``ones`` has;
- ``recent``: the last 512 of them, and 1536 spread over the rest;
- ``clustered``: 32 runs of 64 consecutive keys, spread evenly.

A row never names a key twice.
"""

import itertools
from dataclasses import dataclass

import torch

TOPK = 2048
CLUSTERS = 32
MASKS = ("ones", "uniform", "recent", "clustered")
KEY_START = 96  # stock's offset callback is right only for multiples of 32
# Of 8 requests; the longest, a quarter, keeps whole tiles of 256 rows, as stock places
# rows right only then.
SHARES = (8, 5, 4, 4, 3, 3, 3, 2)


@dataclass(frozen=True)
class Case:
    """One attention call; see the module's docstring."""

    requests: int
    queries: int
    keys: int
    heads: int
    mask: str = "ones"
    causal: bool = False
    offset: bool = False
    dims: tuple[int, int] = (192, 128)

    def __str__(self) -> str:
        flags = "/causal" * self.causal + "/offset" * self.offset
        flags += "/256" * (self.dims == (256, 256))
        size = f"{self.requests}x{self.queries}x{self.keys}"
        return f"{size}/{self.heads}/{self.mask}{flags}"

    @property
    def kernel(self) -> str:
        """The kernel that serves it: dimensions, order of keys, kind of callback."""
        words = ("/".join(map(str, self.dims)), "causal" if self.causal else "full")
        return " ".join((*words, "offset" if self.offset else "dense"))

    @property
    def q_lens(self) -> list[int]:
        """Query lengths of the requests."""
        return split_tokens(self.queries, self.requests)

    @property
    def k_lens(self) -> list[int]:
        """Key lengths of the requests."""
        return split_tokens(self.keys, self.requests)

    @property
    def pairs(self) -> int:
        """Pairs of query and key that dense attention of this case looks at."""
        total = 0
        for q_len, k_len in zip(self.q_lens, self.k_lens):
            total += q_len * k_len - self.causal * q_len * (q_len - 1) // 2
        return total

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products over `pairs`."""
        return 2 * sum(self.dims) * self.heads * self.pairs


def split_tokens(total: int, requests: int) -> list[int]:
    """Tokens of one request, or of several by `SHARES`."""
    if requests == 1:
        return [total]
    return [total * share // sum(SHARES) for share in SHARES]


def parse_case(text: str) -> Case:
    """Argument type of ``--shapes``."""
    size, heads, mask, *flags = text.split("/")
    requests, queries, keys = map(int, size.split("x"))
    unknown = set(flags) - {"causal", "offset", "256"}
    if mask not in MASKS or unknown:
        raise ValueError(
            f"a shape must have a mask of {MASKS} and flags of causal, offset and 256, "
            f"got {text}"
        )
    if requests not in (1, len(SHARES)) or queries > keys:
        raise ValueError(
            f"a shape must have 1 or {len(SHARES)} requests and no more queries than "
            f"keys, got {text}"
        )
    dims = (256, 256) if "256" in flags else (192, 128)
    causal, offset = "causal" in flags, "offset" in flags
    return Case(requests, queries, keys, int(heads), mask, causal, offset, dims)


def topk_rows(visible: torch.Tensor, kind: str, topk: int = TOPK) -> torch.Tensor:
    """Top-k rows in any order, as an indexer gives them.

    Args:
        visible: `[rows]`, how many keys each row may choose from; up to `topk` it
            takes them all, and -1 for the rest.
        kind: of `MASKS`, except ``ones``.
        topk: keys of a row, a multiple of 64.

    Returns:
        int32 `[rows, topk]`.
    """
    device = visible.device
    number = visible[:, None].long()
    slots = torch.arange(topk, device=device)
    if kind == "clustered":
        run = topk // CLUSTERS
        index = _one_of_each(number // run, CLUSTERS) * run
        index = (index[:, :, None] + torch.arange(run, device=device)).flatten(1)
    else:
        recent = topk // 4 if kind == "recent" else 0
        spread = _one_of_each(number - recent, topk - recent)
        index = torch.cat((spread, number - 1 - slots[:recent]), 1)
    index = index.gather(1, torch.rand(index.shape, device=device).argsort(1))
    everything = torch.where(slots < number, slots, -1)
    return torch.where(number <= topk, everything, index).int()


def _one_of_each(number: torch.Tensor, count: int) -> torch.Tensor:
    """One of the integers below `number` from each of `count` equal parts of them."""
    parts = torch.arange(count + 1, device=number.device)
    bounds = (parts * number + count - 1) // count
    first, sizes = bounds[:, :-1], bounds.diff()
    return first + (torch.rand(sizes.shape, device=number.device) * sizes).long()


def visible_keys(q_len: int, k_len: int, causal: bool, device) -> torch.Tensor:
    """How many of a request's keys each of its queries may see, `[q_len]`."""
    if not causal:
        return torch.full((q_len,), k_len, device=device)
    return k_len - q_len + 1 + torch.arange(q_len, device=device)


def cumulative(lengths: list[int], device) -> torch.Tensor:
    """Int32 `[len + 1]`, starting with 0."""
    ends = [0, *itertools.accumulate(lengths)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


class Inputs:
    """Tensors of a case.

    Attributes:
        q, k, v: BF16 `[tokens, heads, dim]`, one of each for every buffer.
        masks: the packed masks, likewise, as the case's callback reads them.
        plain_mask: the same bits from key 0 on, as a dense callback reads them.
        density: set bits over the pairs that dense attention looks at.
        num_bytes: of one buffer's q, k, v, output and mask.
    """

    def __init__(self, case: Case, num_buffers, device) -> None:
        """Makes as many of each as `num_buffers` says for so many bytes."""
        self.case = case
        qk_dim, v_dim = case.dims
        self.cu_q = cumulative(case.q_lens, device)
        self.cu_k = cumulative(case.k_lens, device)
        self.plain_mask = self._mask(0, device)
        mask = self._mask(KEY_START, device) if case.offset else self.plain_mask
        queries, keys = sum(case.q_lens), sum(case.k_lens)
        elements = queries * (qk_dim + v_dim) + keys * (qk_dim + v_dim)
        words = mask[:, : max(case.q_lens)].numel()
        self.num_bytes = 2 * case.heads * elements + 4 * words
        self.density = _count_bits(self.plain_mask) / case.pairs
        count = num_buffers(self.num_bytes)

        def values(tokens: int, dim: int) -> list[torch.Tensor]:
            shape = (tokens, case.heads, dim)
            first = torch.randn(shape, dtype=torch.bfloat16, device=device)
            return [first, *(first.clone() for _ in range(count - 1))]

        self.q, self.k = values(queries, qk_dim), values(keys, qk_dim)
        self.v = values(keys, v_dim)
        self.masks = [mask, *(mask.clone() for _ in range(count - 1))]

    def _mask(self, start: int, device) -> torch.Tensor:
        """Storage of the mask, `start` unset keys in front of the case's."""
        from vllm.model_executor.layers.attention import sparse_mla_attention as layer

        case, reserve = self.case, self.case.offset and start > 0
        longest, keys = max(case.q_lens), start + max(case.k_lens)
        shape = layer._topk_mask_shape(case.requests, longest, keys, reserve)
        mask = torch.zeros(shape, dtype=torch.int32, device=device)
        visible = [
            visible_keys(q_len, k_len, case.causal, device)
            for q_len, k_len in zip(case.q_lens, case.k_lens)
        ]
        if case.mask == "ones":
            for request, counts in enumerate(visible):
                words = _first_bits(start + counts, shape[2])
                words &= ~_first_bits(torch.full_like(counts, start), shape[2])
                mask[request, : len(counts)] = words
        else:
            # The same rows whatever `start` is.
            torch.manual_seed(0)
            rows = torch.cat([topk_rows(counts, case.mask) for counts in visible])
            rows = torch.where(rows < 0, rows, rows + start)
            layer._build_topk_mask(
                list(rows.split(case.q_lens)), case.q_lens, longest, keys, mask
            )
        if reserve:
            mask[:, 0, -1] = start
        return mask


def _first_bits(counts: torch.Tensor, num_words: int) -> torch.Tensor:
    """Int32 `[rows, num_words]` whose first `counts[row]` bits are set."""
    words = torch.arange(num_words, device=counts.device)
    bits = (counts[:, None] - 32 * words).clamp(0, 32)
    return ((1 << bits) - 1).int()


def _count_bits(mask: torch.Tensor) -> int:
    return sum(int(((mask >> bit) & 1).sum()) for bit in range(32))

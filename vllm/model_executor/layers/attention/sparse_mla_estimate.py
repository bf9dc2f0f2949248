# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How long a step's prefill attention takes as masked MHA and as sparse MQA.

Each way is a sum of terms, one for each kind of work, times coefficients in
microseconds that were fitted to measurements of one GPU. Terms are made of what the
metadata has on the host; heads of the rank and top-k are inputs like the lengths.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul
from typing import Any

TILE = 128  # queries, and keys, of a block of FA4's
HEAD_TILE = 64  # heads of a block of sparse MQA's, whatever a rank has

MASKED_MHA = "masked MHA"
MASKED_MHA_TERMS = (
    "launches",
    "new tokens x heads",
    "suffix blocks",
    "chunks",
    "cached tokens",
    "cached tokens x heads",
    "context blocks",
    "merged tokens x heads",
    "mask words",
)
SPARSE_MQA_TERMS = (
    "launches",
    "tokens x heads",
    "tokens x head tiles",
    "pairs x head tiles",
    "far pairs x head tiles",
    "tokens of all sequences",
)


def prefill_terms(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_chunks: int,
    num_heads: int,
    topk: int,
    num_sms: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The work of both ways for the prefills of a step.

    Masked attention is counted in blocks of `TILE` queries by `TILE` keys of one head:
    those of a multiprocessor, or those of the longest row of blocks where that is more.

    Args:
        query_lens: new tokens of each request.
        context_lens: cached tokens of each request.
        num_chunks: in which the cached tokens are gathered; 0 if there are none.
        num_heads: of the rank.
        topk: keys that a query selects where it sees as many.
        num_sms: multiprocessors of the GPU.

    Returns:
        What `MASKED_MHA_TERMS` and what `SPARSE_MQA_TERMS` name, in that order.

    Raises:
        ValueError: no requests, or a length below what a request can have.
    """
    if not query_lens or min(query_lens) < 0 or min(context_lens) < 0:
        raise ValueError(
            "a batch must have requests without negative lengths, got query lengths "
            f"{query_lens} and context lengths {context_lens}"
        )
    tiles = [-(-length // TILE) for length in query_lens]
    longest_row, longest_context = max(tiles), max(context_lens)
    seq_lens = list(map(add, query_lens, context_lens))
    queries, context = sum(query_lens), sum(context_lens)
    share = num_heads / num_sms
    suffix_blocks = share * (sum(map(mul, tiles, tiles)) + sum(tiles)) / 2
    context_blocks = share * sum(map(mul, tiles, context_lens)) / TILE
    masked = (
        1.0,
        queries * num_heads,
        max(longest_row, suffix_blocks),
        num_chunks,
        context,
        context * num_heads,
        max(longest_context / TILE, context_blocks),
        queries * num_heads if num_chunks else 0,
        len(tiles) * longest_row * TILE * max(seq_lens) / 32,
    )
    pairs = queries * topk
    if min(context_lens) < topk:
        for length, missing in zip(query_lens, context_lens):
            missing = topk - missing  # keys that its first query lacks, and its own
            if missing > 0:
                short = min(length, missing)
                pairs -= short * (2 * missing - short - 1) // 2
    head_tiles = -(-num_heads // HEAD_TILE)
    sparse = (
        1.0,
        queries * num_heads,
        queries * head_tiles,
        pairs * head_tiles,
        topk * sum(map(mul, query_lens, seq_lens)) * head_tiles,
        queries + context,
    )
    return masked, sparse


@dataclass(frozen=True)
class PrefillEstimate:
    """Both ways of one layer of one rank.

    Attributes:
        gpu: name of the GPU that the coefficients were fitted on.
        num_sms: its multiprocessors.
        num_heads: of the rank.
        topk: keys that a query selects where it sees as many.
        masked_mha: microseconds of each of `MASKED_MHA_TERMS`.
        sparse_mqa: microseconds of each of `SPARSE_MQA_TERMS`.
    """

    gpu: str
    num_sms: int
    num_heads: int
    topk: int
    masked_mha: tuple[float, ...]
    sparse_mqa: tuple[float, ...]

    def microseconds(
        self, query_lens: Sequence[int], context_lens: Sequence[int], num_chunks: int
    ) -> tuple[float, float]:
        """Time of the prefills of a step by masked MHA, and by sparse MQA.

        Args and errors are those of `prefill_terms`.
        """
        masked, sparse = prefill_terms(
            query_lens,
            context_lens,
            num_chunks,
            self.num_heads,
            self.topk,
            self.num_sms,
        )
        return sum(map(mul, self.masked_mha, masked)), sum(
            map(mul, self.sparse_mqa, sparse)
        )


def make_estimate(
    costs: Mapping[str, Any],
    qk_head_dim: int,
    v_head_dim: int,
    backend: str,
    kv_cache_dtype: str,
    num_heads: int,
    topk: int,
) -> PrefillEstimate:
    """The estimate for a layer, from coefficients as `fit_estimate.py` writes them.

    Args:
        costs: name and multiprocessors of the GPU, and under ``microseconds``
            dimensions -> way -> KV cache dtype -> term -> coefficient.
        backend: vLLM's name of the one that runs sparse MQA.
        kv_cache_dtype: as vLLM spells it; those that do not quantize are ``auto``.

    Raises:
        ValueError: there are no coefficients for these, or they are of other terms.
    """
    if kv_cache_dtype in ("bfloat16", "float16"):
        kv_cache_dtype = "auto"
    ways = costs["microseconds"].get(f"{qk_head_dim}/{v_head_dim}", {})
    found = []
    for way, terms in ((MASKED_MHA, MASKED_MHA_TERMS), (backend, SPARSE_MQA_TERMS)):
        coefficients = ways.get(way, {}).get(kv_cache_dtype)
        if coefficients is None:
            raise ValueError(
                f"there are no coefficients of {costs['gpu']} for {way} at "
                f"{qk_head_dim}/{v_head_dim} over a KV cache of dtype {kv_cache_dtype}"
            )
        if set(coefficients) != set(terms):
            raise ValueError(
                f"coefficients for {way} must be those of {terms}, got "
                f"{tuple(coefficients)}"
            )
        found.append(tuple(coefficients[term] for term in terms))
    return PrefillEstimate(
        costs["gpu"], costs["multiprocessors"], num_heads, topk, *found
    )


def admitted_lengths(
    pays: Callable[[int], bool], first: int, last: int
) -> tuple[tuple[int, int], ...]:
    """Where something pays, among lengths from `first` to `last`, both included.

    Asked at 16 lengths an octave; where the answer changes, the length is found
    exactly. What changes back between two of them is not seen.
    """
    asked = [first]
    while asked[-1] < last:
        asked.append(min(last, asked[-1] + max(1, asked[-1] // 16)))
    answers = list(map(pays, asked))
    ranges = []
    start = first if answers[0] else None
    for low, high, before, after in zip(asked, asked[1:], answers, answers[1:]):
        if before != after:
            change = bisect_left(range(low, high + 1), True, key=_differs(pays, before))
            if after:
                start = low + change
            else:
                ranges.append((start, low + change - 1))
    if answers[-1]:
        ranges.append((start, last))
    return tuple(ranges)


def _differs(pays: Callable[[int], bool], answer: bool) -> Callable[[int], bool]:
    return lambda length: pays(length) != answer


def whole_prompts(estimate: PrefillEstimate, last: int) -> tuple[tuple[int, int], ...]:
    """Lengths of a prompt, computed alone in one step, that take masked MHA.

    From past the top-k, up to which dense MHA serves, to `last`.
    """

    def pays(length: int) -> bool:
        masked, sparse = estimate.microseconds([length], [0], 0)
        return masked < sparse

    return admitted_lengths(pays, estimate.topk + 1, last)


def last_parts(estimate: PrefillEstimate, seq_len: int) -> tuple[tuple[int, int], ...]:
    """How many new tokens, of `seq_len` in all, take masked MHA in a step alone."""

    def pays(length: int) -> bool:
        masked, sparse = estimate.microseconds([length], [seq_len - length], 1)
        return masked < sparse

    return admitted_lengths(pays, 1, seq_len - 1)

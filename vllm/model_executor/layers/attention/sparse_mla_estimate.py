# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How long a step's prefill attention takes as masked MHA and as sparse MQA.

Each way is a sum of terms, one for each kind of work, times coefficients in
microseconds that were fitted to measurements of one GPU. Terms are made of what the
metadata has on the host; heads of the rank and top-k are inputs like the lengths.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

TILE = 128  # queries, and keys, of a block of FA4's
HEAD_TILE = 64  # heads of a block of sparse MQA's, whatever a rank has
FEW_HEADS = 32  # with fewer, FlashMLA runs its decode kernel over an FP8 cache

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
)
SPARSE_MQA_TERMS = (
    "launches",
    "tokens x heads",
    "tokens x head tiles",
    "slots x head tiles",
    "pairs x head tiles",
    "far blocks x head tiles",
    "tokens of all sequences",
)


def prefill_terms(
    query_lens: ArrayLike,
    context_lens: ArrayLike,
    num_chunks: int,
    num_heads: int,
    topk: int,
    num_sms: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The work of both ways for the prefills of a step.

    Masked attention is counted in blocks of `TILE` queries by `TILE` keys of one head:
    those of a multiprocessor, or those of the longest row of blocks where that is more.

    Args:
        query_lens: new tokens of each request; a sequence or an array.
        context_lens: cached tokens of each request, likewise.
        num_chunks: in which the cached tokens are gathered; 0 if there are none.
        num_heads: of the rank.
        topk: keys that a query selects where it sees as many.
        num_sms: multiprocessors of the GPU.

    Returns:
        What `MASKED_MHA_TERMS` and what `SPARSE_MQA_TERMS` name, in that order.

    Raises:
        ValueError: no requests, or a length below what a request can have.
    """
    rows = np.empty((4, len(query_lens)))
    rows[0], rows[1], rows[3] = query_lens, context_lens, 1
    lengths, contexts, tiles, _ = rows
    np.ceil(lengths / TILE, out=tiles)
    shortest = rows.min(initial=0)
    if not len(query_lens) or shortest < 0:
        raise ValueError(
            "a batch must have requests without negative lengths, got query lengths "
            f"{query_lens} and context lengths {context_lens}"
        )
    _, longest_context, longest_row, _ = rows.max(axis=1).tolist()
    products = (rows @ rows.T).tolist()
    queries, context, num_tiles, _ = products[3]
    _, context_blocks, squares, _ = products[2]
    context_blocks /= TILE
    share = num_heads / num_sms
    masked = (
        1.0,
        queries * num_heads,
        max(longest_row, share * (squares + num_tiles) / 2),
        num_chunks,
        context,
        context * num_heads,
        max(longest_context / TILE, share * context_blocks),
        queries * num_heads if num_chunks else 0,
    )
    # The first queries of a request see fewer keys than the top-k.
    missing = np.maximum(topk - contexts, 0)
    short = np.minimum(lengths, missing)
    slots = queries * topk
    pairs = slots - float(short @ (2 * missing - short - 1)) / 2
    head_tiles = -(-num_heads // HEAD_TILE)
    sparse = (
        1.0,
        queries * num_heads,
        queries * head_tiles,
        slots * head_tiles,
        pairs * head_tiles,
        topk * (squares + context_blocks) * head_tiles,
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
        self, query_lens: ArrayLike, context_lens: ArrayLike, num_chunks: int
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


def sparse_mqa_kernel(backend: str, kv_cache_dtype: str, num_heads: int) -> str:
    """Under which name a backend's sparse MQA has coefficients.

    It is the backend's, but where that has another kernel for few heads.
    """
    if (
        backend == "FLASHMLA_SPARSE"
        and kv_cache_dtype == "fp8_ds_mla"
        and num_heads < FEW_HEADS
    ):
        return f"{backend}, fewer than {FEW_HEADS} heads"
    return backend


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
            dimensions -> kernel -> KV cache dtype -> term -> coefficient.
        backend: vLLM's name of the one that runs sparse MQA.
        kv_cache_dtype: as vLLM spells it; those that do not quantize are ``auto``.

    Raises:
        ValueError: there are no coefficients for these, or they are of other terms.
    """
    if kv_cache_dtype in ("bfloat16", "float16"):
        kv_cache_dtype = "auto"
    ways = costs["microseconds"].get(f"{qk_head_dim}/{v_head_dim}", {})
    kernel = sparse_mqa_kernel(backend, kv_cache_dtype, num_heads)
    found = []
    for way, terms in ((MASKED_MHA, MASKED_MHA_TERMS), (kernel, SPARSE_MQA_TERMS)):
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

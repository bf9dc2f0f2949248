# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How long a step's prefill attention takes as masked MHA and as sparse MQA.

Each way is a sum of terms, one for each kind of work, times coefficients in
microseconds that were fitted to measurements of one GPU. Terms are made of what the
metadata has on the host; heads of the rank and top-k are inputs like the lengths.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

TILE = 128  # queries, and keys, of a block of FA4's
TILES_OF_A_SPLIT = 4  # a shorter part of the keys is not worth its launch
# How much longer than a multiprocessor's share of the work one row of blocks may take
# before parts of the cached keys are faster: measured at 1.6 and 1.9 on an H200.
MOST_SHARES_OF_A_ROW = 1.75
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


def num_key_splits(num_blocks: float, num_keys: float, num_sms: int, most: int) -> int:
    """Parts of the keys, as many as give each multiprocessor a block.

    Args:
        num_blocks: blocks of queries and heads, at least 1.
        num_keys: most keys of a request.
        num_sms: multiprocessors.
        most: parts.
    """
    longest = num_keys // (TILE * TILES_OF_A_SPLIT)
    return max(1, int(min(num_sms // num_blocks, longest, most)))


def num_context_splits(
    num_tokens: int,
    num_requests: int,
    max_context_len: int,
    num_heads: int,
    num_sms: int,
    most: int,
) -> int:
    """Parts of the cached keys of requests that are attended to in one call.

    Args:
        num_tokens: new tokens of the requests.
        num_requests: with cached tokens.
        max_context_len: most cached tokens of a request.
        num_heads: of the rank.
        num_sms: multiprocessors.
        most: parts.
    """
    # One query would make FA4 compile another kernel to merge by.
    if num_tokens < 2:
        return 1
    blocks = (num_tokens + num_requests * (TILE - 1)) // TILE * num_heads
    return num_key_splits(blocks, max_context_len, num_sms, most)


def is_faster_in_one_pass(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int,
    num_sms: int,
    most: int,
) -> bool:
    """Whether to attend to cached and new tokens of a step in one call, without parts.

    One multiprocessor works on a row of blocks, the keys of a request for `TILE` of its
    queries and a head. Parts shorten rows, which makes up for what they cost where the
    longest row would go on after all others.

    Args:
        query_lens: new tokens of each request.
        context_lens: cached tokens of each request; some has any.
        num_heads: of the rank.
        num_sms: multiprocessors.
        most: parts.
    """
    continued = [new for new, cached in zip(query_lens, context_lens) if cached]
    parts = num_context_splits(
        *(sum(continued), len(continued), max(context_lens)),
        *(num_heads, num_sms, most),
    )
    if parts == 1:
        return True
    longest = blocks = 0.0
    for new, cached in zip(query_lens, context_lens):
        tiles, cached_blocks = -(-new // TILE), cached / TILE
        longest = max(longest, cached_blocks + tiles)
        blocks += tiles * (cached_blocks + (tiles + 1) / 2)
    return longest <= MOST_SHARES_OF_A_ROW * blocks * num_heads / num_sms


def prefill_terms(
    query_lens: ArrayLike,
    context_lens: ArrayLike,
    num_chunks: int,
    num_heads: int,
    topk: int,
    num_sms: int,
    max_splits: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The work of both ways for the prefills of a step.

    Masked attention is counted in blocks of `TILE` queries by `TILE` keys of one head:
    those of a multiprocessor, or those of the longest row of blocks where that is more.

    Args:
        query_lens: new tokens of each request; a sequence or an array.
        context_lens: cached tokens of each request, likewise, or one number for all.
        num_chunks: of cached tokens, attended to by themselves; 0 if there are none, or
            if they are taken together with the new ones.
        num_heads: of the rank.
        topk: keys that a query selects where it sees as many.
        num_sms: multiprocessors of the GPU.
        max_splits: most parts in which cached keys are taken.

    Returns:
        What `MASKED_MHA_TERMS` and what `SPARSE_MQA_TERMS` name, in that order.

    Raises:
        ValueError: no requests, or a length below what a request can have.
    """
    # One matrix, so that one product has every sum. Numbers are floats and results go
    # where they are to be, for numpy's conversions take longer than its arithmetic.
    # What is multiplied by all rows, or asked for its largest number, adjoins.
    rows = np.empty((8, len(query_lens)))
    lengths, contexts, ends, tiles, ones, short, unseen, cached = rows
    lengths[:], contexts[:] = query_lens, context_lens
    if rows[:2].min(initial=0.0) < 0 or not len(query_lens):
        raise ValueError(
            "a batch must have requests without negative lengths, got query lengths "
            f"{query_lens} and context lengths {context_lens}"
        )
    np.divide(lengths, float(TILE), tiles)
    np.ceil(tiles, tiles)
    # The last block of keys of a request's last queries.
    np.divide(contexts, float(TILE), ends)
    np.add(ends, tiles, ends)
    ones.fill(1.0)
    # Keys of the top-k that a request's first query finds missing, and the queries for
    # which some are.
    np.subtract(float(topk), contexts, unseen)
    np.maximum(unseen, 0.0, unseen)
    np.minimum(lengths, unseen, short)
    np.sign(contexts, cached)
    longest_context, last_end, longest_row = rows[1:4].max(axis=1).tolist()
    of_tiles, of_all, of_short = rows[3:6].dot(rows.T).tolist()
    _, context_blocks, _, squares, _, _, _, cached_tiles = of_tiles
    queries, context, _, num_tiles, _, num_short, _, _ = of_all
    _, _, _, _, _, short_squares, missing, _ = of_short
    context_blocks /= TILE
    share = num_heads / num_sms
    suffix = max(longest_row, share * (squares + num_tiles) / 2)
    if num_chunks:
        # As if every chunk had equally many blocks.
        blocks = max(1.0, cached_tiles * num_heads / num_chunks)
        parts = num_key_splits(blocks, longest_context, num_sms, max_splits)
        context_row = longest_context / TILE / parts
    else:
        # Rows have both kinds of keys: what the longest takes beyond the new ones.
        context_row = last_end - suffix
    masked = (
        1.0,
        queries * num_heads,
        suffix,
        num_chunks,
        context,
        context * num_heads,
        max(context_row, share * context_blocks),
        queries * num_heads if num_chunks else 0,
    )
    slots = queries * topk
    pairs = slots - missing + (short_squares + num_short) / 2
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
        max_splits: most parts in which cached keys are taken.
        one_pass: whether cached and new tokens are taken together where they can be.
        masked_mha: microseconds of each of `MASKED_MHA_TERMS`.
        sparse_mqa: microseconds of each of `SPARSE_MQA_TERMS`.
    """

    gpu: str
    num_sms: int
    num_heads: int
    topk: int
    max_splits: int
    one_pass: bool
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
            self.max_splits,
        )
        return sum(map(mul, self.masked_mha, masked)), sum(
            map(mul, self.sparse_mqa, sparse)
        )


def sparse_mqa_kernel(backend: str, kv_cache_dtype: str, num_heads: int) -> str:
    """Under which name a backend's sparse MQA has coefficients.

    It is the backend's, but where that has another kernel for few heads, or none of its
    own for prefills.
    """
    if backend == "FLASH_ATTN_MLA_SPARSE_FA4":
        return "FLASHINFER_MLA_SPARSE"
    if (
        backend == "FLASHMLA_SPARSE"
        and kv_cache_dtype == "fp8_ds_mla"
        and num_heads < FEW_HEADS
    ):
        return f"{backend}, fewer than {FEW_HEADS} heads"
    return backend


class Costs(TypedDict):
    """Coefficients as `fit_estimate.py` writes them.

    Attributes:
        gpu: name of the GPU that they were measured on.
        multiprocessors: of that GPU.
        max_splits: most parts in which cached keys were taken.
        one_pass: whether cached and new tokens were taken together where they can be,
            which no quantized cache allows.
        microseconds: dimensions -> kernel -> KV cache dtype -> term -> coefficient.
    """

    gpu: str
    multiprocessors: Annotated[int, Field(gt=0)]
    max_splits: Annotated[int, Field(gt=0)]
    one_pass: bool
    microseconds: dict[
        str,
        dict[
            str,
            dict[str, dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]],
        ],
    ]


def read_costs(path: str) -> Costs:
    """Coefficients from a JSON file.

    Raises:
        ValueError: it cannot be read, or has something else in it.
    """
    try:
        return TypeAdapter(Costs).validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        found = error.errors()[0]
        place = " / ".join(map(str, found["loc"])) or "the file"
        raise ValueError(
            f"{path} must hold what fit_estimate.py --json writes; {place}: "
            f"{found['msg']}"
        ) from error


def check_measured_on(costs: Costs, gpu: str, num_sms: int) -> None:
    """Refuse coefficients of another GPU than this.

    Raises:
        ValueError: name or multiprocessors differ.
    """
    if (costs["gpu"], costs["multiprocessors"]) != (gpu, num_sms):
        raise ValueError(
            f"they were measured on {costs['gpu']} with {costs['multiprocessors']} "
            f"multiprocessors, and this is {gpu} with {num_sms}"
        )


def make_estimate(
    costs: Costs,
    qk_head_dim: int,
    v_head_dim: int,
    backend: str,
    kv_cache_dtype: str,
    num_heads: int,
    topk: int,
) -> PrefillEstimate:
    """The estimate for a layer.

    Args:
        costs: of the GPU.
        qk_head_dim: of the layer.
        v_head_dim: of the layer.
        backend: vLLM's name of the one that runs sparse MQA.
        kv_cache_dtype: as vLLM spells it; those that do not quantize are ``auto``.
        num_heads: of the rank.
        topk: of the indexer.

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
        costs["gpu"],
        costs["multiprocessors"],
        num_heads,
        topk,
        costs["max_splits"],
        costs["one_pass"] and kv_cache_dtype == "auto",
        *found,
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
    start = first
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
        context_len = seq_len - length
        one_pass = estimate.one_pass and is_faster_in_one_pass(
            *([length], [context_len]),
            *(estimate.num_heads, estimate.num_sms, estimate.max_splits),
        )
        num_chunks = 0 if one_pass else 1
        masked, sparse = estimate.microseconds([length], [context_len], num_chunks)
        return masked < sparse

    return admitted_lengths(pays, 1, seq_len - 1)

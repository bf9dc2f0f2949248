# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The work of both ways, counted one by one."""

import pytest

from vllm.model_executor.layers.attention.sparse_mla_estimate import (
    MASKED_MHA,
    MASKED_MHA_TERMS,
    SPARSE_MQA_TERMS,
    PrefillEstimate,
    admitted_lengths,
    last_parts,
    make_estimate,
    prefill_terms,
    whole_prompts,
)

TOPK, SMS = 512, 132
BATCHES = [
    pytest.param([(1, 0)], id="one token"),
    pytest.param([(128, 0)], id="tile"),
    pytest.param([(129, 0), (4096, 0)], id="two prompts"),
    pytest.param([(16, 14000)] * 30 + [(4096, 0)], id="continuations"),
    pytest.param([(4096, 0), (16, 14000)], id="one continuation"),
    pytest.param([(300, 500), (600, 511), (7, 512), (5, 100)], id="around the top-k"),
]


def count(requests, num_chunks, num_heads, max_splits):
    """Terms by name, from their definition."""
    queries = sum(q for q, _ in requests)
    context = sum(c for _, c in requests)
    visible = [c + i + 1 for q, c in requests for i in range(q)]
    tiles = [-(-q // 128) for q, _ in requests]
    suffix = sum(row + 1 for n in tiles for row in range(n)) * num_heads
    cached = sum(n * c / 128 for n, (_, c) in zip(tiles, requests)) * num_heads
    longest = max(c for _, c in requests)
    blocks = sum(n for n, (_, c) in zip(tiles, requests) if c) * num_heads
    idle = [n for n in range(2, max_splits + 1) if n * blocks <= SMS]
    splits = max((n for n in idle if n * 512 <= longest), default=1)
    head_tiles = (num_heads + 63) // 64
    new_keys = max(max(tiles), suffix / SMS)
    if num_chunks:
        longest_row = longest / 128 / splits
    else:
        longest_row = max(n + c / 128 for n, (_, c) in zip(tiles, requests)) - new_keys
    masked = {
        "launches": 1,
        "new tokens x heads": queries * num_heads,
        "suffix blocks": new_keys,
        "chunks": num_chunks,
        "cached tokens": context,
        "cached tokens x heads": context * num_heads,
        "context blocks": max(longest_row, cached / SMS),
        "merged tokens x heads": queries * num_heads if num_chunks else 0,
    }
    sparse = {
        "launches": 1,
        "tokens x heads": queries * num_heads,
        "tokens x head tiles": queries * head_tiles,
        "slots x head tiles": queries * TOPK * head_tiles,
        "pairs x head tiles": sum(min(TOPK, n) for n in visible) * head_tiles,
        "far blocks x head tiles": sum(
            n * (n + c / 128) for n, (_, c) in zip(tiles, requests)
        )
        * TOPK
        * head_tiles,
        "tokens of all sequences": queries + context,
    }
    return masked, sparse


@pytest.mark.parametrize("max_splits", [1, 32])
@pytest.mark.parametrize("num_heads", [8, 64, 65, 128])
@pytest.mark.parametrize("num_chunks", [0, 1], ids=["one-pass", "apart"])
@pytest.mark.parametrize("requests", BATCHES)
def test_terms_are_what_they_are_called(requests, num_chunks, num_heads, max_splits):
    query_lens, context_lens = map(list, zip(*requests))
    num_chunks *= any(context_lens)
    terms = prefill_terms(
        query_lens, context_lens, num_chunks, num_heads, TOPK, SMS, max_splits
    )
    expected = count(requests, num_chunks, num_heads, max_splits)
    for names, found, by_name in zip(
        (MASKED_MHA_TERMS, SPARSE_MQA_TERMS), terms, expected
    ):
        assert dict(zip(names, found, strict=True)) == pytest.approx(by_name)


@pytest.mark.parametrize(
    ("query_lens", "context_lens"), [([], []), ([5, -1], [0, 0]), ([5], [-1])]
)
def test_impossible_lengths_are_refused(query_lens, context_lens):
    with pytest.raises(ValueError, match="without negative lengths"):
        prefill_terms(query_lens, context_lens, 0, 8, TOPK, SMS, 1)


def test_microseconds_are_coefficients_times_terms():
    ways = {
        MASKED_MHA: {"auto": {name: 0.0 for name in reversed(MASKED_MHA_TERMS)}},
        "A_BACKEND": {"auto": {name: 0.0 for name in SPARSE_MQA_TERMS}},
    }
    ways[MASKED_MHA]["auto"] |= {"launches": 7.0, "cached tokens": 0.5}
    ways["A_BACKEND"]["auto"] |= {"tokens x head tiles": 2.0}
    costs = {"gpu": "a GPU", "multiprocessors": SMS, "max_splits": 1, "one_pass": False}
    costs["microseconds"] = {"192/128": ways}
    estimate = make_estimate(costs, 192, 128, "A_BACKEND", "bfloat16", 128, TOPK)
    assert estimate.microseconds([10, 20], [100, 0], 1) == (57.0, 120.0)


@pytest.mark.parametrize(
    ("ranges", "first", "last"),
    [
        ((), 513, 100000),
        (((513, 100000),), 513, 100000),
        (((1, 1),), 1, 1),
        (((513, 17389),), 513, 131072),
        (((1234, 131072),), 513, 131072),
        (((700, 3001), (9000, 70001)), 513, 131072),
    ],
)
def test_lengths_are_found_exactly(ranges, first, last):
    asked = []

    def pays(length):
        asked.append(length)
        return any(low <= length <= high for low, high in ranges)

    assert admitted_lengths(pays, first, last) == ranges
    assert first <= min(asked) and max(asked) <= last and len(asked) < 250


def test_a_prompt_alone_is_asked_for():
    def estimate(masked_us, sparse_us):
        return PrefillEstimate("a GPU", SMS, 8, TOPK, 1, False, masked_us, sparse_us)

    launches = (100.0, *[0.0] * (len(MASKED_MHA_TERMS) - 1))
    by_token = (0.0, 0.01, *[0.0] * (len(SPARSE_MQA_TERMS) - 2))
    # 100 us against 0.08 us a token.
    assert whole_prompts(estimate(launches, by_token), 9000) == ((1251, 9000),)
    assert last_parts(estimate(launches, by_token), 3000) == ((1251, 2999),)
    assert whole_prompts(estimate((*by_token, 0.0), by_token), 9000) == ()

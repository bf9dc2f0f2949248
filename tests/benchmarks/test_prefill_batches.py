# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Batches are what their text says."""

import pytest
from prefill_batches import fit_cases, mix_cases, parse_batch


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("q4096", [(4096, 0)]),
        ("q2k", [(2048, 0)]),
        ("q1ks4k", [(1024, 3072)]),
        ("q4096,2q16s14016", [(16, 14000)] * 2 + [(4096, 0)]),
        ("2q1k_3q1s1k", [(1, 1023)] * 3 + [(1024, 0)] * 2),
    ],
    ids=["prompt", "k", "context", "mixed", "separated as vLLM does"],
)
def test_grammar(text, requests):
    assert parse_batch(text).requests == tuple(requests)
    assert str(parse_batch(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "4096", "q", "q0", "0q5", "q5s4", "q5,", "q5 s9", "-1q5", "q4096+0", "q5K"],
)
def test_what_is_no_batch_is_refused(text):
    with pytest.raises(ValueError, match="a batch must"):
        parse_batch(text)


def test_fit_covers_heads_and_topk():
    cases = list(fit_cases())
    assert len(cases) == len({(m, h, t, str(b)) for m, h, t, b in cases})
    pairs = {(model, heads, topk) for model, heads, topk, _ in cases}
    assert len(pairs) == 3 * (5 + 4)
    assert all(max(batch.seq_lens) > topk for _, _, topk, batch in cases)
    assert {(m, h) for m, h, _, _ in mix_cases()} <= {(m, h) for m, h, _ in pairs}

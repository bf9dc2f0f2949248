# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Both mask builders hold the mask contract for any input, so they agree bit for bit.

Triton runs everywhere (in its interpreter without a GPU), the CuTe DSL on a GPU. The
expectation is built key by key from Python sets.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_sparse_mla.testing.masks import MaskCall

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
HOSTILE = (-1, -1, -1, -2, INT32_MIN, INT32_MAX, INT32_MAX - 31)

pytestmark = pytest.mark.stock_fails("stock has no builder over packed rows")


def build_with_triton(*args):
    from vllm.model_executor.kernels.attention.dsa import topk_mask

    topk_mask.build_topk_mask_triton(*args)


def build_with_cutedsl(*args):
    from vllm.model_executor.kernels.attention.dsa import topk_mask_cutedsl

    topk_mask_cutedsl.TOPK_MASK_KERNEL(*args)


BUILDERS = [
    pytest.param(build_with_triton, id="triton"),
    pytest.param(build_with_cutedsl, id="cutedsl", marks=pytest.mark.gpu),
]


@dataclass
class Case:
    """Arguments of a builder as plain Python values."""

    rows: list[list[int]]
    q_lens: list[int]
    max_q_len: int
    num_keys: int
    row_padding: int
    row_offset: int
    spare_rows: int
    context_lens: list[int] | None
    range_starts: list[int] | None


@st.composite
def cases(draw):
    num_keys = draw(st.one_of(st.integers(1, 130), st.integers(1, 4200)))
    edges = st.sampled_from((0, num_keys - 1, num_keys, num_keys + 31, *HOSTILE))
    index = st.one_of(st.integers(0, num_keys + 40), edges)
    q_lens = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    num_topk = draw(st.one_of(st.integers(1, 9), st.just(64)))
    # A few drawn indices repeated give wide rows without a slow draw.
    few = st.lists(index, min_size=1, max_size=num_topk)
    rows = [
        (values * num_topk)[:num_topk]
        for values in draw(
            st.lists(few, min_size=sum(q_lens), max_size=sum(q_lens)),
        )
    ]

    def per_request(values):
        return draw(st.lists(values, min_size=len(q_lens), max_size=len(q_lens)))

    lens = st.one_of(st.integers(0, num_keys), st.just(INT32_MAX))
    return Case(
        rows=rows,
        q_lens=q_lens,
        max_q_len=max(1, max(q_lens) + draw(st.integers(0, 2))),
        num_keys=num_keys,
        row_padding=draw(st.integers(0, 5)),
        row_offset=draw(st.integers(0, 3)),
        spare_rows=draw(st.integers(0, 2)),
        context_lens=per_request(lens) if draw(st.booleans()) else None,
        range_starts=per_request(lens) if draw(st.booleans()) else None,
    )


def expected_words(case, num_words):
    """Mask words of every request and row, as unsigned integers."""
    mask = []
    rows = iter(case.rows)
    for request, q_len in enumerate(case.q_lens):
        start = case.range_starts[request] if case.range_starts else 0
        context = case.context_lens[request] if case.context_lens else 0
        for row in range(case.max_q_len):
            keys = next(rows) if row < q_len else []
            bits = {key - start for key in keys if start <= key <= context + row}
            words = [0] * num_words
            for bit in bits:
                if bit < case.num_keys:
                    words[bit // 32] |= 1 << bit % 32
            mask.append(words)
    return mask


def prepare(case, device):
    num_topk = len(case.rows[0]) if case.rows else 8
    wide = torch.full(
        (len(case.rows), num_topk + case.row_padding + case.row_offset), 3
    )
    topk = wide.to(dtype=torch.int32, device=device)
    topk = topk[:, case.row_offset :][:, :num_topk]
    if case.rows:
        topk[:] = torch.tensor(case.rows)
    sizes = (case.q_lens, case.max_q_len, case.num_keys)
    ranges = (case.context_lens, case.range_starts)
    return MaskCall(topk, *sizes, *ranges, spare=(1, case.spare_rows, 4))


@pytest.mark.parametrize("builder", BUILDERS)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases())
def test_any_input_gives_the_mask_and_touches_nothing_else(builder, case, device):
    found = prepare(case, device).words(builder)
    unsigned = found.flatten(0, 1).to(torch.int64) & 0xFFFFFFFF
    assert unsigned.tolist() == expected_words(case, found.shape[2])

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The masks that the benchmarks time are the masks that they name."""

import pytest
import torch
from mask_cases import (
    KEY_START,
    MASKS,
    TOPK,
    Inputs,
    parse_case,
    topk_rows,
)

from vllm_sparse_mla.testing.reference import unpack_topk_mask

VISIBLE = (1, 100, TOPK - 1, TOPK, TOPK + 1, 3000, 5001)


@pytest.mark.parametrize("kind", MASKS[1:])
def test_rows_hold_distinct_keys_in_sight(kind):
    rows = topk_rows(torch.tensor(VISIBLE), kind)
    assert rows.dtype == torch.int32
    for visible, row in zip(VISIBLE, rows):
        keys = row[row >= 0]
        assert len(keys) == len(keys.unique()) == min(visible, TOPK)
        assert keys.max() < visible
        if kind == "recent" and visible > TOPK:
            assert torch.isin(torch.arange(visible - 512, visible), keys).all()


@pytest.mark.parametrize(
    "text",
    [
        "1x4x300/1/ones",
        "1x4x300/1/ones/causal/offset",
        "1x8x3000/1/uniform/offset",
        "8x64x5000/1/recent/causal",
        "1x8x3000/1/clustered/256",
    ],
)
def test_masks_hold_what_the_shape_says(text):
    case = parse_case(text)
    assert str(case) == text
    inputs = Inputs(case, lambda num_bytes: 2, torch.device("cpu"))
    longest, pairs, kept = max(case.k_lens), 0, 0
    plain = unpack_topk_mask(inputs.plain_mask, longest)
    for request, (q_len, k_len) in enumerate(zip(case.q_lens, case.k_lens)):
        for row in range(q_len):
            visible = k_len - q_len + row + 1 if case.causal else k_len
            pairs += visible
            count = int(plain[request, row, :visible].sum())
            kept += count
            assert count == visible if case.mask == "ones" else min(visible, TOPK)
            assert not plain[request, row, visible:].any()
        assert not plain[request, q_len:].any()
    assert case.pairs == pairs
    assert inputs.density == pytest.approx(kept / pairs)
    if case.offset:
        shifted = unpack_topk_mask(inputs.masks[1], longest + KEY_START)
        assert torch.equal(shifted[:, :, KEY_START:], plain)
        assert (inputs.masks[1][:, 0, -1] == KEY_START).all()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The mask contract: shape, alignment, storage that FA4's callbacks may read."""

import pytest
import torch

from vllm.model_executor.layers.attention.sparse_mla_attention import (
    _masked_mha_workspace_fits,
    _topk_mask_shape,
)

STORAGE_UNCHECKED = "stock never checks the storage that its callbacks assume"


@pytest.mark.parametrize(
    ("batch_size", "max_query_len", "max_key_len", "plain", "reserved"),
    [
        pytest.param(1, 1, 1, (1, 128, 4), (1, 128, 4), id="one-key"),
        pytest.param(1, 128, 96, (1, 128, 4), (1, 128, 4), id="three-words"),
        pytest.param(1, 128, 128, (1, 128, 4), (1, 128, 8), id="four-words"),
        pytest.param(2, 129, 129, (2, 256, 8), (2, 256, 8), id="past-one-tile"),
        pytest.param(3, 256, 4097, (3, 256, 132), (3, 256, 132), id="two-stages"),
        pytest.param(1, 257, 4096, (1, 512, 128), (1, 512, 132), id="next-pair"),
    ],
)
def test_topk_mask_shape(batch_size, max_query_len, max_key_len, plain, reserved):
    sizes = (batch_size, max_query_len, max_key_len)
    assert _topk_mask_shape(*sizes) == plain
    assert _topk_mask_shape(*sizes, reserve_key_starts_word=True) == reserved


@pytest.mark.parametrize("reserve", [False, True], ids=["plain", "reserved"])
def test_rows_are_whole_16_byte_groups(reserve):
    for key_len in (1, 31, 32, 33, 127, 128, 129, 4097):
        shape = _topk_mask_shape(2, 129, key_len, reserve_key_starts_word=reserve)
        mask = torch.empty(shape, dtype=torch.int32)
        row_bytes = mask.stride(1) * mask.element_size()
        batch_bytes = mask.stride(0) * mask.element_size()
        assert row_bytes % 16 == batch_bytes % 16 == 0
        assert shape[2] * 32 >= key_len + 32 * reserve


def test_workspace_fits_up_to_its_last_word():
    # 300 queries need 512 rows, a chunk of 1000 keys 32 words.
    needed = 2 * 512 * 32
    assert _masked_mha_workspace_fits(2, 300, 1000, needed)
    assert not _masked_mha_workspace_fits(2, 300, 1000, needed - 1)
    # Without context the suffix alone counts: 300 keys, 12 words.
    assert _masked_mha_workspace_fits(2, 300, 0, 2 * 512 * 12)
    assert not _masked_mha_workspace_fits(2, 300, 0, 2 * 512 * 12 - 1)


def _storage(shape, offset_words=0, strides=None):
    strides = strides or (shape[1] * shape[2], shape[2], 1)
    words = sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1
    flat = torch.zeros(words + offset_words + 4, dtype=torch.int32)
    start = -flat.data_ptr() // 4 % 4 + offset_words
    return flat.as_strided(shape, strides, start)


@pytest.mark.stock_fails(STORAGE_UNCHECKED)
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(_storage((2, 128, 8)), id="contiguous"),
        pytest.param(_storage((5, 128, 8))[2:5], id="slice-of-requests"),
        pytest.param(_storage((2, 256, 8))[:, :129], id="view-of-rows"),
        pytest.param(_storage((6, 128, 8))[2:5, 1:], id="slice-of-both"),
        pytest.param(_storage((2, 128, 8), offset_words=4), id="next-boundary"),
        pytest.param(_storage((2, 128, 8), strides=(2048, 16, 1)), id="padded-rows"),
    ],
)
def test_storage_that_callbacks_can_read_is_accepted(mask):
    from vllm.model_executor.kernels.attention.dsa.topk_mask import (
        check_topk_mask_storage,
    )

    check_topk_mask_storage(mask)


@pytest.mark.stock_fails(STORAGE_UNCHECKED)
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        pytest.param(_storage((2, 128, 8)).long(), "must be int32", id="int64"),
        pytest.param(_storage((2, 128, 8))[0], "must be 3-D", id="two-dimensions"),
        pytest.param(
            _storage((2, 128, 8)).transpose(1, 2), "last stride 1", id="transposed"
        ),
        pytest.param(
            _storage((2, 128, 8))[..., :6], "multiple of 4 words", id="narrowed"
        ),
        *(
            pytest.param(
                _storage((2, 128, 8))[..., words:], "", id=f"from-word-{words}"
            )
            for words in (1, 2, 3)
        ),
        pytest.param(
            _storage((2, 128, 8), strides=(1280, 10, 1)), "row strides", id="odd-rows"
        ),
        pytest.param(
            _storage((2, 128, 8), strides=(1026, 8, 1)), "row strides", id="odd-batch"
        ),
        *(
            pytest.param(
                _storage((2, 128, 8), offset_words=words),
                "start at a multiple of 16 bytes",
                id=f"base-off-by-{4 * words}-bytes",
            )
            for words in (1, 2, 3)
        ),
    ],
)
def test_storage_that_callbacks_would_misread_is_refused(mask, message):
    from vllm.model_executor.kernels.attention.dsa.topk_mask import (
        check_topk_mask_storage,
    )

    with pytest.raises(ValueError, match=f"mask .*{message}"):
        check_topk_mask_storage(mask)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The host checks exactly what the compiled callbacks assume about storage.

They assume 16-byte alignment of the base address and of both outer strides
(``sparse_mla_mask``). That a slice by request keeps the 16-byte load is shown in
``test_sm100_codegen``.
"""

import pytest
import torch

from vllm.model_executor.layers.attention.sparse_mla_attention import (
    TOPK_MASK_ALIGN_BYTES,
    _check_topk_mask_storage,
    _topk_mask_shape,
)

SHAPE = _topk_mask_shape(6, 100, 1000, True)


def mask_at(offset_bytes: int, shape=SHAPE) -> torch.Tensor:
    """A mask that begins ``offset_bytes`` after a 16-byte boundary."""
    length = shape[0] * shape[1] * shape[2]
    storage = torch.zeros(length + 8, dtype=torch.int32)
    assert storage.data_ptr() % TOPK_MASK_ALIGN_BYTES == 0
    return storage[offset_bytes // 4 :][:length].view(shape)


@pytest.mark.parametrize("offset", [4, 8, 12])
def test_view_off_the_boundary_is_refused(offset):
    with pytest.raises(ValueError, match="mask must start at a multiple of 16 bytes"):
        _check_topk_mask_storage(mask_at(offset))


@pytest.mark.parametrize("offset", [0, 16])
def test_view_on_the_boundary_is_accepted(offset):
    _check_topk_mask_storage(mask_at(offset))


def test_slice_by_request_and_by_row_is_accepted():
    mask = mask_at(0)
    _check_topk_mask_storage(mask[2:5])
    _check_topk_mask_storage(mask[:, :77])
    _check_topk_mask_storage(mask[2:5, 1:])


@pytest.mark.parametrize("words", [1, 2, 3])
def test_slice_by_word_is_refused(words):
    with pytest.raises(ValueError, match="mask"):
        _check_topk_mask_storage(mask_at(0)[..., words:])


@pytest.mark.parametrize("row_stride, batch_stride", [(9, 1024), (12, 1026)])
def test_stride_off_the_boundary_is_refused(row_stride, batch_stride):
    storage = torch.zeros(8192, dtype=torch.int32)
    mask = storage.as_strided((2, 4, 8), (batch_stride, row_stride, 1))
    with pytest.raises(ValueError, match="strides that are multiples of 16 bytes"):
        _check_topk_mask_storage(mask)

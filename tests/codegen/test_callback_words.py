# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The callbacks alone, bit for bit, on a GPU of any kind.

The expected words come from the unpacked mask by plain indexing in NumPy, which knows
nothing of words, groups or shifts.
"""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu

ROWS = 129  # one more than a block of rows
NUM_KEYS = 5 * 128 + 37
WORDS = 24  # 22 with keys, the rest is padding and the reserved word


@pytest.fixture(scope="module")
def mask_mods():
    from vllm.model_executor.layers.attention import sparse_mla_mask

    return sparse_mla_mask


@pytest.fixture(scope="module")
def callback_words():
    from vllm_sparse_mla.codegen.callback_kernel import callback_words

    return callback_words


def random_mask(batch: int, seed: int = 0) -> torch.Tensor:
    """A packed mask whose bits past the last key are all ones."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2, (batch, ROWS, WORDS * 32), dtype=np.uint8)
    bits[..., NUM_KEYS:] = 1
    words = np.packbits(bits, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(words.copy()).cuda()


def unpack(words: torch.Tensor) -> np.ndarray:
    """Bool [..., 32 * words] of int32 [..., words]."""
    octets = np.ascontiguousarray(words.cpu().numpy()).view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little").astype(bool)


def check(mask: torch.Tensor, answer: torch.Tensor, starts: list[int], step: int = 128):
    """Compare the columns that are keys; what lies past the last key is FA4's."""
    expected, got = unpack(mask), unpack(answer)
    assert got.shape == (*expected.shape[:2], answer.shape[2], 128)
    for request, start in enumerate(starts):
        for group in range(answer.shape[2]):
            first = start + group * step
            length = max(0, min(NUM_KEYS - first, 128))
            np.testing.assert_array_equal(
                got[request, :, group, :length],
                expected[request, :, first : first + length],
                err_msg=f"request {request}, key start {start}, group {group}",
            )


def num_groups(start: int) -> int:
    """Groups of 128 columns from ``start``, the last one cut by the last key."""
    return -(-(NUM_KEYS - start) // 128)


def test_dense(mask_mods, callback_words):
    mask = random_mask(batch=2)
    answer = callback_words(mask_mods.dense_mask_mod, mask, WORDS // 4)
    # Every bit is the row's own, padding included.
    np.testing.assert_array_equal(answer.flatten(2).cpu(), mask.cpu())


def test_dense_on_a_slice_by_request(mask_mods, callback_words):
    mask = random_mask(batch=6)
    answer = callback_words(mask_mods.dense_mask_mod, mask[2:5], WORDS // 4)
    np.testing.assert_array_equal(answer.flatten(2).cpu(), mask[2:5].cpu())


@pytest.mark.parametrize("base", [0, 128, 256])
def test_offset_with_every_key_start_in_key_starts(mask_mods, callback_words, base):
    starts = list(range(base, base + 128))
    mask = random_mask(batch=len(starts), seed=base)
    key_starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
    before = mask.clone()
    answer = callback_words(
        mask_mods.offset_dense_mask_mod, mask, num_groups(base), key_starts
    )
    check(mask, answer, starts)
    assert torch.equal(mask, before)


def test_offset_with_every_key_start_in_the_reserved_word(mask_mods, callback_words):
    starts = list(range(128))
    mask = random_mask(batch=len(starts), seed=1)
    mask[:, 0, -1] = torch.tensor(starts, dtype=torch.int32, device="cuda")
    answer = callback_words(mask_mods.offset_dense_mask_mod, mask, num_groups(0))
    check(mask, answer, starts)


@pytest.mark.parametrize(
    "start", [NUM_KEYS - 1, NUM_KEYS - 37, NUM_KEYS - 38, 511, 512]
)
def test_offset_at_the_end_of_the_row(mask_mods, callback_words, start):
    mask = random_mask(batch=1, seed=2)
    key_starts = torch.tensor([start], dtype=torch.int32, device="cuda")
    answer = callback_words(
        mask_mods.offset_dense_mask_mod, mask, num_groups(start), key_starts
    )
    check(mask, answer, [start])


@pytest.mark.parametrize("step", [1, 29, 80])
def test_offset_from_any_first_column(mask_mods, callback_words, step):
    starts = [0, 1, 31, 32, 100]
    mask = random_mask(batch=len(starts), seed=3)
    key_starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
    answer = callback_words(
        mask_mods.offset_dense_mask_mod, mask, 5, key_starts, column_step=step
    )
    check(mask, answer, starts, step)


def test_one_word_a_call(callback_words):
    from vllm_sparse_mla.codegen.word_callbacks import word_mask_mod

    mask = random_mask(batch=2, seed=4)
    answer = callback_words(word_mask_mod, mask, WORDS // 4)
    np.testing.assert_array_equal(answer.flatten(2).cpu(), mask.cpu())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FA4's callbacks answer with exactly the keys of the packed mask, run on the host.

The expected bits come from the packed boolean grid by plain slicing. Bits
past the last key are ones: a callback that strayed into them would show it.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_sparse_mla.testing.host_callbacks import columns_kept
from vllm_sparse_mla.testing.masks import pack

ROWS = 3
NUM_KEYS = 3 * 128 + 37
WORDS = 16  # 14 hold keys, one is padding, the last one is reserved

LOSES_KEYS = "stock's offset callback loses keys where a context is no multiple of 32"
ONE_AUX_TENSOR = "stock's offset callback takes the key start from the mask alone"

STARTS = [
    pytest.param(start, marks=pytest.mark.stock_fails(LOSES_KEYS))
    if start % 32
    else start
    for start in range(128)
]


@pytest.fixture(scope="module")
def mask_mods():
    from vllm.model_executor.layers.attention import sparse_mla_mask

    return sparse_mla_mask


@pytest.fixture
def grid():
    """Bool ``[2, ROWS, 32 * WORDS]``."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.rand(2, ROWS, 32 * WORDS, generator=generator) < 0.5
    bits[..., NUM_KEYS:] = True
    return bits


def assert_keeps(kept, grid, starts):
    octets = kept.numpy().view(np.uint8)
    columns = np.unpackbits(octets, axis=-1, bitorder="little").astype(bool)
    for request, start in enumerate(starts):
        np.testing.assert_array_equal(
            columns[request, :, : NUM_KEYS - start], grid[request, :, start:NUM_KEYS]
        )


def test_dense_callback(mask_mods, grid):
    kept = columns_kept(mask_mods.dense_mask_mod, [pack(grid)], ROWS, NUM_KEYS)
    assert_keeps(kept, grid, (0, 0))


@pytest.mark.parametrize("start", STARTS)
def test_offset_callback_from_the_reserved_word(mask_mods, grid, start):
    mask = pack(grid)
    starts = (start, NUM_KEYS - 1 - start)  # the second ends in the row's last group
    if start % 32 == 0:
        starts = (start, 128)  # both aligned
    mask[:, 0, -1] = torch.tensor(starts, dtype=torch.int32)
    kept = columns_kept(
        mask_mods.offset_dense_mask_mod, [mask], ROWS, NUM_KEYS - min(starts)
    )
    assert_keeps(kept, grid, starts)


@pytest.mark.stock_fails(ONE_AUX_TENSOR)
@pytest.mark.parametrize("start", range(1, 128, 9))
def test_offset_callback_from_a_second_tensor(mask_mods, grid, start):
    starts = (start, NUM_KEYS - 1)
    mask = pack(grid)
    key_starts = torch.tensor(starts, dtype=torch.int32)
    kept = columns_kept(
        mask_mods.offset_dense_mask_mod,
        [mask, key_starts],
        ROWS,
        NUM_KEYS - min(starts),
    )
    assert_keeps(kept, grid, starts)
    assert torch.equal(mask, pack(grid))


@pytest.mark.stock_fails("stock's offset callback answers with 32 keys a call")
def test_both_answer_with_128_keys_a_call(mask_mods):
    assert mask_mods.dense_mask_mod.__vec_size__ == 128
    assert mask_mods.offset_dense_mask_mod.__vec_size__ == 128


LOADER = "cute.autovec_copy(source, words)"


@pytest.mark.stock_fails("stock's callbacks have no hash of their file")
def test_fa4_knows_a_callback_by_all_of_its_file(mask_mods, tmp_path):
    """Else FA4's kernel cache on disk would serve a kernel with the old loader."""
    from vllm.vllm_flash_attn.cute.utils import hash_callable

    names = ("dense_mask_mod", "offset_dense_mask_mod")
    source = Path(mask_mods.__file__).read_text()
    assert source.count(LOADER) == 1
    hashes = []
    for text in (source, source.replace(LOADER, f"{LOADER}  # changed")):
        path = tmp_path / f"callbacks_{len(hashes)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        hashes.append([hash_callable(getattr(copy, name)) for name in names])
    assert hashes[0] == [hash_callable(getattr(mask_mods, name)) for name in names]
    assert len({*hashes[0], *hashes[1]}) == 4

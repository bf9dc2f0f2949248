# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The reader of cache rows against definitions, and the stand-ins against it."""

import itertools
import struct

import pytest
import torch

from vllm_sparse_mla.testing import kv_cache

FLAT = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
QUANTIZED = ("fp8_ds_mla", "fp8", *FLAT)
# Half a step of the format: relative, and of the smallest steps.
ROUNDING = {"fp8_e5m2": (2.0**-3, 2.0**-17)} | dict.fromkeys(
    ("fp8_ds_mla", "fp8", "fp8_e4m3"), (2.0**-4, 2.0**-10)
)
SCALE = torch.tensor([0.37])


def latents(tokens=7, width=576):
    values = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    # Magnitudes over the whole range of the formats, and beyond the flat ones'.
    values *= torch.exp2(torch.linspace(-14, 9, width))
    return values.to(torch.bfloat16)


@pytest.mark.parametrize("kv_cache_dtype", FLAT)
def test_every_byte_means_what_pytorch_says(kv_cache_dtype):
    rows = torch.arange(256, dtype=torch.uint8)
    found = kv_cache.read_latents(rows, kv_cache_dtype, torch.ones(1))
    expected = rows.view(FLAT[kv_cache_dtype]).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_row_of_fp8_ds_mla_by_hand():
    one, minus_three = 0b0_0111_000, 0b1_1000_100
    codes = bytes([one] * 128 + [minus_three] * 128 + [0] * 255 + [one])
    scales = struct.pack("<4f", 0.5, 3.0, 7.0, 2.0**-20)
    rope = struct.pack("<64H", 0x3F80, 0xC040, *[0x4049] * 62)  # 1, -3, 3.140625
    row = torch.frombuffer(bytearray(codes + scales + rope), dtype=torch.uint8)
    values = kv_cache.read_latents(row, "fp8_ds_mla").tolist()
    assert values[:256] == [0.5] * 128 + [-9.0] * 128
    assert values[256:512] == [0.0] * 255 + [2.0**-20]
    assert values[512:] == [1.0, -3.0, *[3.140625] * 62]


def test_unquantized_rows_are_themselves():
    rows = latents()
    assert torch.equal(kv_cache.read_latents(rows, "auto"), rows.double())
    assert kv_cache.write_latents(rows, "bfloat16", SCALE) is rows


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
def test_written_rows_are_read_within_half_a_step(kv_cache_dtype):
    values = latents()
    rows = kv_cache.write_latents(values, kv_cache_dtype, SCALE)
    assert rows.shape[-1] == kv_cache.row_bytes(kv_cache_dtype, 576)
    found, exact = kv_cache.read_latents(rows, kv_cache_dtype, SCALE), values.double()
    relative, smallest = ROUNDING[kv_cache_dtype]
    if kv_cache_dtype == "fp8_ds_mla":
        assert torch.equal(found[:, 512:], exact[:, 512:])
        scales = kv_cache.ds_mla_scales(rows)
        found, exact = found[:, :512], exact[:, :512]
        largest = exact.unflatten(-1, (4, 128)).abs().amax(-1).repeat_interleave(128, 1)
        assert torch.equal(scales.log2(), scales.log2().round())
        assert (largest <= 448 * scales).all()
        assert ((largest > 224 * scales) | (scales == 2.0**-13)).all()
    else:
        scales = SCALE.double()
        top = torch.finfo(FLAT.get(kv_cache_dtype, torch.float8_e4m3fn)).max
        exact = exact.clamp(-top * scales, top * scales)
    step = torch.maximum(relative * exact.abs(), smallest * scales)
    # A scale is a float32, and so is the quotient by one.
    assert ((found - exact).abs() <= step * (1 + 2.0**-20)).all()
    assert ((found - exact).abs() > step / 4).any()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "width", "scale", "match"),
    [
        ("fp8_ds_mla", 576, SCALE, "576 bytes"),
        ("nvfp4_ds_mla", 352, SCALE, "nvfp4_ds_mla"),
        ("bogus", 656, SCALE, "bogus"),
        ("fp8", 576, None, "scale"),
    ],
)
def test_rows_that_cannot_be_read(kv_cache_dtype, width, scale, match):
    with pytest.raises(ValueError, match=match):
        kv_cache.read_latents(
            torch.zeros(1, width, dtype=torch.uint8), kv_cache_dtype, scale
        )


def gather(cache, kv_cache_dtype, table, lens, starts, width):
    """What vLLM's layer asks for; rows past the last one keep their NaN."""
    cu = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    dst = torch.full((sum(lens) + 1, width), float("nan"), dtype=torch.bfloat16)
    seq_starts = torch.tensor(starts, dtype=torch.int32)
    if kv_cache_dtype == "fp8_ds_mla":
        kv_cache.cp_gather_and_upconvert_fp8_kv_cache(
            cache, dst[:-1], table, cu, len(lens), seq_starts
        )
    else:
        requests = torch.repeat_interleave(torch.tensor(lens)).int()
        kv_cache.gather_and_maybe_dequant_cache(
            *(cache, dst, table, cu, requests, sum(lens)),
            *(kv_cache_dtype, SCALE, seq_starts),
        )
    assert dst[-1].isnan().all()
    return dst[:-1]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "width"),
    [*((dtype, 576) for dtype in ("auto", *QUANTIZED)), ("fp8", 512), ("auto", 512)],
)
def test_gathers_walk_the_block_table_from_each_start(kv_cache_dtype, width):
    block_size = 4
    rows = kv_cache.write_latents(latents(24, width), kv_cache_dtype, SCALE)
    cache = rows.view(6, block_size, -1)
    table = torch.tensor([[5, 1, 3], [0, 0, 0], [2, 0, 4]]).int()
    lens, starts = [6, 0, 3], [3, 0, 5]
    found = gather(cache, kv_cache_dtype, table, lens, starts, width)
    positions = [
        (request, start + i)
        for request, (length, start) in enumerate(zip(lens, starts))
        for i in range(length)
    ]
    picked = [cache[table[b, p // block_size], p % block_size] for b, p in positions]
    exact = kv_cache.read_latents(torch.stack(picked), kv_cache_dtype, SCALE)
    # One rounding to bfloat16, after one to float32.
    allowed = exact.abs() * 2.0**-8 * (1 + 2.0**-14)
    assert ((found.double() - exact).abs() <= allowed).all()


def test_gathers_refuse_other_formats():
    table = torch.zeros(1, 1, dtype=torch.int32)
    for kv_cache_dtype, width in (("nvfp4_ds_mla", 352), ("fp8_ds_mla", 576)):
        cache = torch.zeros(1, 4, width, dtype=torch.uint8)
        with pytest.raises(ValueError, match="kv cache|656"):
            gather(cache, kv_cache_dtype, table, [2], [0], 576)

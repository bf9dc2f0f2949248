# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of the latent KV cache: a reader and a writer by definition, and the gathers.

`read_latents` decodes rows bit by bit for the oracle. `write_latents` and the two
gathers of the paged cache stand in for vLLM's CUDA calls where there is no GPU; they
convert by PyTorch, which the reader does not use.

Nothing here imports vLLM.
"""

import torch

# A row of fp8_ds_mla: 512 e4m3 values, a float32 scale for each 128 of them, then the
# RoPE part, 64 bfloat16 values. In bytes:
_DS_MLA_PARTS = (512, 16, 128)
DS_MLA_ROW_BYTES = sum(_DS_MLA_PARTS)
_DS_MLA_TILES = (4, 128)

# The flat formats hold one value a byte and have one scale for the whole cache.
_FLAT_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def row_bytes(kv_cache_dtype: str, latent_dim: int) -> int | None:
    """Bytes of a row of a quantized cache; None for an unquantized one."""
    if kv_cache_dtype == "fp8_ds_mla":
        return DS_MLA_ROW_BYTES
    return latent_dim if kv_cache_dtype in _FLAT_DTYPES else None


def _fp8_values(exponent_bits: int) -> torch.Tensor:
    """What each byte of an OCP 8-bit format means: float64 `[256]`."""
    byte = torch.arange(256)
    mantissa_bits = 7 - exponent_bits
    sign = (1 - 2 * (byte >> 7)).double()
    exponent = (byte >> mantissa_bits) % (1 << exponent_bits)
    mantissa = (byte % (1 << mantissa_bits)).double() / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    # The lowest exponent holds subnormals, which lack the leading one.
    power = torch.exp2((exponent.clamp_min(1) - bias).double())
    values = sign * power * (mantissa + (exponent > 0))
    if exponent_bits == 4:  # e4m3 has no infinity, and one NaN of each sign.
        return values.masked_fill(byte % 128 == 127, float("nan"))
    # e5m2 is a short IEEE 754 half: the highest exponent is infinity, or NaN.
    highest = exponent == (1 << exponent_bits) - 1
    values = values.masked_fill(highest & (mantissa > 0), float("nan"))
    return values.where(~highest | values.isnan(), sign * float("inf"))


def read_latents(
    rows: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode rows of a latent KV cache by the definition of their format.

    Args:
        rows: `[..., entry]` as they lie in the cache, of any type; the last
            dimension is contiguous.
        kv_cache_dtype: "fp8_ds_mla", "fp8", "fp8_e4m3", "fp8_e5m2", or an
            unquantized one, whose rows have their own type.
        scale: of the flat FP8 formats, one number.

    Returns:
        float64 `[..., latent_dim]`.

    Raises:
        ValueError: an unknown format, rows of another width, or no scale.
    """
    if kv_cache_dtype == "auto" or kv_cache_dtype.endswith("float16"):
        return rows.double()
    codes = rows.view(torch.uint8)
    if kv_cache_dtype in _FLAT_DTYPES:
        if scale is None:
            raise ValueError(f"scale must be a number for {kv_cache_dtype}, got None")
        values = _fp8_values(5 if kv_cache_dtype == "fp8_e5m2" else 4)
        return values.to(rows.device)[codes.long()] * scale.double()
    if kv_cache_dtype != "fp8_ds_mla" or codes.shape[-1] != DS_MLA_ROW_BYTES:
        raise ValueError(
            f"kv_cache_dtype must be one whose rows have {codes.shape[-1]} bytes, "
            f"got {kv_cache_dtype}"
        )
    parts = codes.split(_DS_MLA_PARTS, dim=-1)
    codes, scales, rope = (part.contiguous() for part in parts)
    tiles = _fp8_values(4).to(rows.device)[codes.long()].unflatten(-1, _DS_MLA_TILES)
    nope = tiles * scales.view(torch.float32).double().unsqueeze(-1)
    # A bfloat16 is the upper half of a float32, and its lower byte comes first.
    low, high = rope.int().unflatten(-1, (-1, 2)).unbind(-1)
    rope = ((high << 24) | (low << 16)).view(torch.float32).double()
    return torch.cat((nope.flatten(-2), rope), dim=-1)


def ds_mla_scales(rows: torch.Tensor) -> torch.Tensor:
    """The scale of each NoPE value of `fp8_ds_mla` rows: float64 `[..., 512]`."""
    scales = rows[..., 512:528].contiguous().view(torch.float32).double()
    return scales.repeat_interleave(_DS_MLA_TILES[1], dim=-1)


def write_latents(
    latents: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor
) -> torch.Tensor:
    """Encode bfloat16 `[tokens, latent_dim]` as rows of a KV cache.

    Args:
        latents: values to store.
        kv_cache_dtype: as of `read_latents`.
        scale: of the flat FP8 formats, one number.

    Returns:
        `[tokens, entry]`: uint8 for a quantized cache, else `latents`.
    """
    if kv_cache_dtype in _FLAT_DTYPES:
        return _to_fp8(latents.float() / scale, _FLAT_DTYPES[kv_cache_dtype])
    if kv_cache_dtype != "fp8_ds_mla":
        return latents
    nope, rope = latents.split((512, 64), dim=-1)
    tiles = nope.float().unflatten(-1, _DS_MLA_TILES)
    top = torch.finfo(torch.float8_e4m3fn).max
    scales = (tiles.abs().amax(dim=-1, keepdim=True) / top).clamp_min(1e-4)
    scales = scales.log2().ceil().exp2()  # vLLM takes powers of two
    codes = _to_fp8(tiles / scales, torch.float8_e4m3fn).flatten(-2)
    parts = (codes, scales.squeeze(-1), rope.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def _to_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # PyTorch's conversion gives NaN or infinity where vLLM's gives the largest value.
    top = torch.finfo(dtype).max
    return values.clamp(-top, top).to(dtype).view(torch.uint8)


def _cached_rows(
    src_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_rows: torch.Tensor,
    num_tokens: int,
    seq_starts: torch.Tensor | None,
) -> torch.Tensor:
    """Rows of a paged cache; request `b`'s come from row `first_rows[b]` on."""
    row = torch.arange(num_tokens, device=src_cache.device)
    # The last request that begins at or before the row: requests may be empty.
    request = torch.searchsorted(first_rows.contiguous(), row, right=True) - 1
    position = row - first_rows[request]
    if seq_starts is not None:
        position = position + seq_starts[request]
    block_size = src_cache.shape[1]
    block = block_table[request, position // block_size].long()
    return src_cache[block, position % block_size]


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Stand in for vLLM's gather of flat latent rows from the paged cache.

    Args:
        src_cache: `[num_blocks, block_size, entry]`.
        dst: `[>= num_tokens, entry]`, written up to `num_tokens` rows.
        block_table: int32 `[B, blocks]`.
        cu_seq_lens: int32 `[B + 1]`, first row in `dst` of each request.
        token_to_seq: int32 `[num_tokens]`, the request of each row; unused.
        num_tokens: rows to gather.
        kv_cache_dtype: unquantized, or a flat FP8 format.
        scale: float32 `[1]`, of a flat FP8 format.
        seq_starts: int32 `[B]`, position of each request's first row.

    Raises:
        ValueError: a cache of another format.
    """
    rows = _cached_rows(
        src_cache, block_table, cu_seq_lens[:-1], num_tokens, seq_starts
    )
    if kv_cache_dtype in _FLAT_DTYPES:
        rows = rows.view(_FLAT_DTYPES[kv_cache_dtype]).float() * scale
    elif kv_cache_dtype != "auto" and not kv_cache_dtype.endswith("float16"):
        raise ValueError(f"Unsupported data type of kv cache: {kv_cache_dtype}")
    dst[:num_tokens] = rows.to(dst.dtype)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Stand in for vLLM's gather of `fp8_ds_mla` rows from the paged cache.

    Args:
        src_cache: uint8 `[num_blocks, block_size, 656]`.
        dst: bfloat16 `[tokens, 576]`, all of it written.
        block_table: int32 `[B, blocks]`.
        workspace_starts: int32 `[>= B]`, first row in `dst` of each request.
        batch_size: `B`.
        seq_starts: int32 `[B]`, position of each request's first row.

    Raises:
        ValueError: rows or a destination of another width.
    """
    if src_cache.shape[-1] != DS_MLA_ROW_BYTES or dst.shape[1] != 576:
        raise ValueError(
            f"src_cache and dst must be {DS_MLA_ROW_BYTES} and 576 wide, "
            f"got {src_cache.shape[-1]} and {dst.shape[1]}"
        )
    rows = _cached_rows(
        src_cache, block_table, workspace_starts[:batch_size], len(dst), seq_starts
    )
    parts = rows.split(_DS_MLA_PARTS, dim=-1)
    codes, scales, rope = (part.contiguous() for part in parts)
    tiles = codes.view(torch.float8_e4m3fn).float().unflatten(-1, _DS_MLA_TILES)
    nope = (tiles * scales.view(torch.float32).unsqueeze(-1)).flatten(-2)
    dst.copy_(torch.cat((nope.to(dst.dtype), rope.view(torch.bfloat16)), dim=-1))


GATHERS = (gather_and_maybe_dequant_cache, cp_gather_and_upconvert_fp8_kv_cache)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reference attention for sparse MLA prefill, in plain PyTorch.

Two independent oracles: `masked_attention_varlen` reads the bit-packed top-k
mask and attends to all keys; `gathered_topk_attention` gathers the keys that a
top-k row names and never sees a mask. `flash_attn_varlen_func` and
`merge_attn_states` stand in for two of the three CUDA calls of masked-MHA prefill
where there is no GPU; the third is in `kv_cache`.

Nothing here imports vLLM. Lengths and starts are counted in tokens, LSE is the
natural logarithm, and a row without any key has output 0 and LSE -inf.
"""

from collections.abc import Callable, Iterator

import torch

# Elements of the largest temporary (128 MiB in float64).
_MAX_TEMPORARY_NUMEL = 1 << 24


def unpack_topk_mask(mask: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Unpack bit `j` of word `i` of a row into key `32 * i + j`.

    Args:
        mask: int32 `[..., W]`, any strides.
        num_keys: number of keys to unpack, at most `32 * W`.

    Returns:
        bool `[..., num_keys]`, True where the key is kept.

    Raises:
        ValueError: if the rows hold fewer than `num_keys` bits.
    """
    return _unpack_keys(mask, 0, num_keys)


def _unpack_keys(mask: torch.Tensor, key_start: int, num_keys: int) -> torch.Tensor:
    num_bits = 32 * mask.shape[-1]
    if key_start < 0 or key_start + num_keys > num_bits:
        raise ValueError(
            f"mask rows must hold keys {key_start} to {key_start + num_keys}, got "
            f"{mask.shape[-1]} words ({num_bits} keys)"
        )
    keys = key_start + torch.arange(num_keys, device=mask.device)
    words = mask[..., keys >> 5]
    return (words >> (keys & 31).to(mask.dtype)) & 1 != 0


def _blocks(count: int, numel_each: int) -> Iterator[slice]:
    """Parts of ``range(count)``, as many at once as a temporary may hold."""
    step = max(1, min(count, _MAX_TEMPORARY_NUMEL // max(numel_each, 1)))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _check_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> tuple[list[int], list[int]]:
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rise = all(cu == sorted(cu) and cu[0] == 0 for cu in (cu_q, cu_k))
    fit = cu_q[-1] <= len(q) and cu_k[-1] <= min(len(k), len(v))
    if len(cu_q) != len(cu_k) or not (rise and fit):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have one length and rise from 0 to at "
            f"most the rows of q, k and v, got {cu_q} and {cu_k}"
        )
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ValueError(
            "k and v must have one head count that divides q's, got "
            f"{k.shape[1]}, {v.shape[1]} and {q.shape[1]}"
        )
    return cu_q, cu_k


def _expand_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat key/value heads `[T, Hkv, D]` to `[T, num_heads, D]`."""
    ratio = num_heads // x.shape[1]
    return x if ratio == 1 else x.repeat_interleave(ratio, dim=1)


def masked_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    key_starts: torch.Tensor | None = None,
    softmax_scale: float,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys that a bit-packed mask keeps.

    Args:
        q: `[Tq, H, D]`.
        k: `[Tk, Hkv, D]`, `Hkv` divides `H`.
        v: `[Tk, Hkv, Dv]`.
        cu_seqlens_q: int32 `[B + 1]`, first query row of each request.
        cu_seqlens_k: int32 `[B + 1]`, first key row of each request.
        mask: int32 `[B, >= max_seqlen_q, W]`, or None to keep every key.
        key_starts: int `[B]`; column `k` of request `b` is then bit
            `key_starts[b] + k` of its rows. None reads from bit 0.
        softmax_scale: factor of the scores.
        causal: also drop keys above the diagonal, aligned at the bottom right.
        dtype: precision of the arithmetic. None computes as eager PyTorch does
            in `q.dtype`: scores and probabilities are rounded to it.

    Returns:
        Output `[Tq, H, Dv]` in `dtype` (None: `q.dtype`), and LSE `[H, Tq]`
        in float64 if `dtype` is float64, else in float32.

    Raises:
        ValueError: lengths that do not fit the tensors, or a mask too small.
    """
    cu_q, cu_k = _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    dtype = q.dtype if dtype is None else dtype
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    num_heads = q.shape[1]
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=dtype)
    lse = q.new_full((num_heads, q.shape[0]), float("-inf"), dtype=lse_dtype)
    starts = [0] * (len(cu_q) - 1) if key_starts is None else key_starts.tolist()
    if len(starts) < len(cu_q) - 1:
        raise ValueError(
            f"key_starts must have {len(cu_q) - 1} entries, got {len(starts)}"
        )
    if mask is not None and mask.shape[0] < len(cu_q) - 1:
        raise ValueError(f"mask must have {len(cu_q) - 1} requests, got {mask.shape}")

    for request, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:])):
        q_len, k_len = q1 - q0, k1 - k0
        if q_len == 0 or k_len == 0:
            continue
        if mask is not None and mask.shape[1] < q_len:
            raise ValueError(
                f"mask must have {q_len} rows for request {request}, got {mask.shape}"
            )
        request_k = _expand_heads(k[k0:k1], num_heads).to(dtype)
        request_v = _expand_heads(v[k0:k1], num_heads).to(dtype)
        for rows in _blocks(q_len, k_len):
            keep = q.new_ones((rows.stop - rows.start, k_len), dtype=torch.bool)
            if mask is not None:
                keep &= _unpack_keys(mask[request, rows], starts[request], k_len)
            if causal:
                keep = keep.tril(k_len - q_len + rows.start)
            tokens = slice(q0 + rows.start, q0 + rows.stop)
            for heads in _blocks(num_heads, keep.numel()):
                scores = torch.einsum(
                    "qhd,khd->hqk", q[tokens, heads].to(dtype), request_k[:, heads]
                )
                scores = (scores * softmax_scale).to(lse_dtype)
                scores.masked_fill_(~keep, float("-inf"))
                top = scores.amax(dim=-1, keepdim=True)
                weights = torch.exp(scores - top.clamp_min(torch.finfo(lse_dtype).min))
                total = weights.sum(dim=-1, keepdim=True)
                weights = (weights / total.clamp_min(1.0)).to(dtype)
                out[tokens, heads] = torch.einsum(
                    "hqk,khd->qhd", weights, request_v[:, heads]
                )
                lse[heads, tokens] = (total.log() + top).squeeze(-1)
    return out, lse


def gathered_topk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    topk: torch.Tensor,
    *,
    softmax_scale: float,
    query_offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys that each top-k row names, gathered by index.

    Duplicates count once; `-1` and any index outside the request's keys are
    dropped.

    Args:
        q: `[Tq, H, D]`.
        k: `[Tk, Hkv, D]`, `Hkv` divides `H`.
        v: `[Tk, Hkv, Dv]`.
        cu_seqlens_q: int32 `[B + 1]`, first query row of each request.
        cu_seqlens_k: int32 `[B + 1]`, first key row of each request.
        topk: int `[Tq, topk]`, key positions within the request.
        softmax_scale: factor of the scores.
        query_offsets: int `[B]`, position of each request's first query. Keys
            after a query's own position are then dropped. None drops none.
        dtype: precision of the arithmetic and of the results.

    Returns:
        Output `[Tq, H, Dv]` and LSE `[H, Tq]`, both in `dtype`.

    Raises:
        ValueError: lengths that do not fit the tensors.
    """
    cu_q, cu_k = _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    num_heads = q.shape[1]
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=dtype)
    lse = q.new_full((num_heads, q.shape[0]), float("-inf"), dtype=dtype)
    if topk.shape[0] < cu_q[-1]:
        raise ValueError(f"topk must have {cu_q[-1]} rows, got {topk.shape[0]}")
    offsets = None if query_offsets is None else query_offsets.tolist()

    for request, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:])):
        if q0 == q1 or k0 == k1:
            continue
        request_k = _expand_heads(k[k0:k1], num_heads).to(dtype)
        request_v = _expand_heads(v[k0:k1], num_heads).to(dtype)
        gathered = topk.shape[1] * max(k.shape[2], v.shape[2])
        for rows in _blocks(q1 - q0, gathered):
            tokens = slice(q0 + rows.start, q0 + rows.stop)
            keys = topk[tokens].long().sort(dim=-1).values  # [rows, topk]
            valid = (keys >= 0) & (keys < k1 - k0)
            valid[:, 1:] &= keys[:, 1:] != keys[:, :-1]
            if offsets is not None:
                positions = offsets[request] + torch.arange(
                    rows.start, rows.stop, device=keys.device
                )
                valid &= keys <= positions[:, None]
            keys = keys.where(valid, 0)
            has_key = valid.any(dim=-1)
            for heads in _blocks(num_heads, keys.shape[0] * gathered):
                scores = torch.einsum(
                    "qhd,qkhd->qhk",
                    q[tokens, heads].to(dtype),
                    request_k[:, heads][keys],
                )
                scores = scores * softmax_scale
                scores = scores.where(valid[:, None], float("-inf"))
                weights = scores.softmax(dim=-1).where(has_key[:, None, None], 0)
                out[tokens, heads] = torch.einsum(
                    "qhk,qkhd->qhd", weights, request_v[:, heads][keys]
                )
                lse[heads, tokens] = scores.logsumexp(dim=-1).t()
    return out, lse


def attention_error(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Largest absolute error of each row.

    Args:
        out: `[T, ...]`, the result to judge.
        reference: `[T, ...]` of the same shape, normally float64.

    Returns:
        float64 `[T]`; inf for a row in which either holds a NaN, or one an
        infinity that the other does not hold.
    """
    out, reference = out.double().flatten(1), reference.double().flatten(1)
    difference = (out - reference).abs().where(out != reference, 0.0)
    return difference.nan_to_num(nan=float("inf"), posinf=float("inf")).amax(dim=-1)


def attention_error_budget(
    reference: torch.Tensor, eager: torch.Tensor
) -> torch.Tensor:
    """Error that a kernel may make in each row.

    Twice the error of an eager run in the kernel's own precision, plus one unit
    in the last place (two roundings) at the row's largest magnitude. A budget
    for each row, not one for all, keeps the few-key rows, whose outputs are
    large, from hiding a lost key in the others.

    Args:
        reference: `[T, ...]`, the float64 result on the same rounded inputs.
        eager: `[T, ...]`, the eager result in the kernel's output precision.

    Returns:
        float64 `[T]`.
    """
    finite = reference.double().flatten(1).nan_to_num(neginf=0.0, posinf=0.0)
    rounding = torch.finfo(eager.dtype).eps * finite.abs().amax(dim=-1)
    return 2 * attention_error(eager, reference) + rounding


def packed_mask_mod_name(mask_mod: Callable | None) -> str:
    """Name of the packed callback that FA4 would call, "none" if there is none."""
    if mask_mod is None:
        return "none"
    # SM90 wraps the callback in a front that carries the packed one.
    mask_mod = getattr(mask_mod, "__packed_mask_mod__", mask_mod)
    return getattr(mask_mod, "__name__", repr(mask_mod))


def _packed_mask_arguments(
    mask_mod: Callable | None, aux_tensors: list[torch.Tensor] | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The packed mask and the key starts that an FA4 call's callback would read."""
    if mask_mod is None:
        return None, None
    name = packed_mask_mod_name(mask_mod)
    if not aux_tensors:
        raise ValueError(f"aux_tensors must hold the mask of {name}, got {aux_tensors}")
    mask = aux_tensors[0]
    if name == "dense_mask_mod":
        return mask, None
    if name == "offset_dense_mask_mod":
        starts = aux_tensors[1] if len(aux_tensors) > 1 else mask[:, 0, -1]
        return mask, starts
    raise ValueError(
        f"mask_mod must be dense_mask_mod or offset_dense_mask_mod, got {name}"
    )


def flash_attn_varlen_func(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    mask_mod: Callable | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_tensor_leading_dims: list[int] | None = None,
    fa_version: int = 4,
    num_splits: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Stand in for the FA4 call of masked-MHA prefill.

    Takes the keyword arguments that the layer hands to FA4 and rejects any
    other. The callback is recognised by its name and never called: the packed
    mask is read here, independently of it. As FA4 does, it accumulates in
    float32 and rounds the output once.

    Returns:
        Output `[Tq, H, Dv]` in `q.dtype`; with `return_softmax_lse` also the
        LSE, float32 `[H, Tq]`.

    Raises:
        ValueError: a callback, mask or length that FA4 would misread.
    """
    if fa_version != 4:
        raise ValueError(f"fa_version must be 4 for a packed mask, got {fa_version}")
    mask, key_starts = _packed_mask_arguments(mask_mod, aux_tensors)
    if mask is not None:
        leading = aux_tensor_leading_dims
        if leading is None or len(leading) != len(aux_tensors or ()) or leading[0] != 2:
            raise ValueError(
                "aux_tensor_leading_dims must name the mask's last dimension (2) "
                f"and one for each further aux tensor, got {leading}"
            )
        # The callback reads aligned groups of four words.
        if mask.shape[-1] % 4 or mask.stride(-1) != 1:
            raise ValueError(
                "mask must have rows of whole 16-byte groups, got shape "
                f"{tuple(mask.shape)}, strides {mask.stride()}"
            )
    for name, cu_seqlens, longest in (
        ("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
        ("max_seqlen_k", cu_seqlens_k, max_seqlen_k),
    ):
        if cu_seqlens.numel() > 1 and longest < int(cu_seqlens.diff().max()):
            raise ValueError(
                f"{name} must be at least {int(cu_seqlens.diff().max())}, got {longest}"
            )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    result, lse = masked_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        mask,
        key_starts=key_starts,
        softmax_scale=scale,
        causal=causal,
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    result = result.to(q.dtype) if out is None else out.copy_(result)
    return (result, lse) if return_softmax_lse else result


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Stand in for vLLM's merge of two partial attention results by LSE.

    Rows at and after `prefill_tokens_with_context` take the suffix. A LSE of
    +inf counts as -inf; where both are, the output is 0 and the LSE -inf.
    `output` and `output_lse` may be the prefix tensors themselves.

    Args:
        output: `[T, H, D]`, written.
        prefix_output: `[T, H, D]`.
        prefix_lse: float32 `[H, T]`.
        suffix_output: `[T, H, D]`.
        suffix_lse: float32 `[H, T]`.
        output_lse: `[H, T]`, written if given.
        prefill_tokens_with_context: rows that have a prefix. None: all.
        output_scale: must be None (no FP8 output).

    Raises:
        ValueError: an `output_scale`, or no rows, which vLLM's kernel cannot launch.
    """
    if output_scale is not None:
        raise ValueError("output_scale must be None, got a scale for FP8 output")
    if output.shape[0] == 0:
        raise ValueError("output must have rows, got none")
    n = output.shape[0]
    if prefill_tokens_with_context is not None:
        n = prefill_tokens_with_context
    minus_inf = float("-inf")
    lse = torch.stack((prefix_lse[:, :n], suffix_lse[:, :n])).float()
    lse = lse.masked_fill(lse == float("inf"), minus_inf)  # [2, H, n]
    merged_lse = torch.logsumexp(lse, dim=0)
    empty = merged_lse == minus_inf
    weights = torch.exp(lse - merged_lse.masked_fill(empty, 0.0))
    prefix_weight, suffix_weight = weights.transpose(1, 2).unsqueeze(-1)
    merged = (
        prefix_output[:n].float() * prefix_weight
        + suffix_output[:n].float() * suffix_weight
    )
    output[:n] = merged.masked_fill(empty.t().unsqueeze(-1), 0.0).to(output.dtype)
    output[n:] = suffix_output[n:]
    if output_lse is not None:
        output_lse[:, :n] = merged_lse
        output_lse[:, n:] = suffix_lse[:, n:]

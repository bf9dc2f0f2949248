# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FA4's SM90 kernel with vectorised callbacks, against a float64 reference on the GPU.

Needs SM90 and ``VLLM_SPARSE_MLA_SM90=1``. Masks are packed here by plain torch, and
every bit that belongs to no key of the call is random: keys before the first one and
past the last one, rows past a request's last query, rows that only pad the storage.
"""

import itertools

import pytest
import torch

from vllm_sparse_mla import envs
from vllm_sparse_mla.testing.reference import masked_attention_varlen

pytestmark = pytest.mark.gpu

DIMS = {"192-128": (192, 128), "256-256": (256, 256)}
# Row tiles are 128 high; column tiles 128 wide at 192/128 and 80 at 256/256.
LENGTHS = [1, 127, 128, 129, 300, 4097]
MIXED = [129, 0, 4097, 1, 0, 127, 300, 128]
MIXED_KEYS = [4097, 300, 1, 0, 0, 300, 129, 640]
FEW = [300, 0, 1, 129]
FEW_KEYS = [129, 80, 300, 0]


@pytest.fixture(scope="module", autouse=True)
def sm90():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    if not envs.sm90():
        pytest.skip("set VLLM_SPARSE_MLA_SM90=1 to overlay FA4's mask module")
    torch.manual_seed(20)


def topk_rows(q_len: int, k_len: int, first_position: int) -> torch.Tensor:
    """A realistic causal top-k: sinks, a local window and scattered keys.

    Every 37th row from row 5 on keeps nothing.
    """
    positions = first_position + torch.arange(q_len, device="cuda")[:, None]
    keys = torch.arange(k_len, device="cuda")[None]
    keep = torch.rand((q_len, k_len), device="cuda") < 256 / (positions + 1)
    keep |= (keys < 4) | (positions - keys < 48)
    keep[5::37] = False
    return keep & (keys <= positions)


def pack(keeps, key_starts, reserve_word: bool) -> torch.Tensor:
    """Pack one boolean matrix a request into mask storage, from its first key on.

    Returns:
        int32 [B, max_q_len, W], a view of storage with rows padded as the contract
        says. With ``reserve_word`` the key start is in the last word of row 0.
    """
    max_q_len = max(keep.shape[0] for keep in keeps)
    row_multiple = 128 if max_q_len <= 128 else 256
    num_keys = max(s + keep.shape[1] for s, keep in zip(key_starts, keeps))
    num_rows = -(-max_q_len // row_multiple) * row_multiple
    num_words = -(-(-(-num_keys // 32) + reserve_word) // 4) * 4
    num_bits = 32 * num_words
    shape = (len(keeps), num_rows, num_words)
    out = torch.empty(shape, dtype=torch.int32, device="cuda")
    weights = 1 << torch.arange(32, device="cuda")
    for b, (start, keep) in enumerate(zip(key_starts, keeps)):
        bits = torch.rand((num_rows, num_bits), device="cuda") < 0.5
        q_len, k_len = keep.shape
        bits[:q_len, start : start + k_len] = keep
        out[b] = (bits.view(num_rows, num_words, 32) * weights).sum(-1).int()
        if reserve_word:
            out[b, 0, -1] = start
    return out[:, :max_q_len]


def cumulative(lengths) -> torch.Tensor:
    total = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(total, dtype=torch.int32, device="cuda")


def make_inputs(dims, num_heads, q_lens, k_lens):
    """BF16 q, k, v; v is the strided tail of a joint projection, as the layer has."""
    head_dim, head_dim_v = dims
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn((sum(q_lens), num_heads, head_dim), **bf16)
    k = torch.randn((sum(k_lens), num_heads, head_dim), **bf16)
    joint = torch.randn((sum(k_lens), num_heads, 128 + head_dim_v), **bf16)
    return q, k, joint[..., 128:]


def attend(inputs, q_lens, k_lens, *, causal, mask_mod=None, aux=()):
    """FA4 into poisoned outputs; rows past the last one must keep the poison."""
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = inputs
    out = q.new_full((q.shape[0] + 8, q.shape[1], v.shape[2]), float("nan"))
    lse = q.new_full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32)
    masked = {}
    if mask_mod is not None:
        masked = {
            "mask_mod": mask_mod,
            "aux_tensors": list(aux),
            "aux_tensor_leading_dims": [2, 0][: len(aux)],
        }
    _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=cumulative(q_lens),
        cu_seqlens_k=cumulative(k_lens),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(k_lens),
        softmax_scale=q.shape[2] ** -0.5,
        causal=causal,
        num_splits=1,
        return_lse=True,
        out=out[: q.shape[0]],
        lse=lse,
        **masked,
    )
    torch.cuda.synchronize()
    assert out[q.shape[0] :].isnan().all(), "wrote past the last query"
    return out[: q.shape[0]], lse


def packed(name: str):
    from vllm.model_executor.layers.attention import sparse_mla_mask

    return getattr(sparse_mla_mask, f"{name}_mask_mod")


def check_against_float64(inputs, q_lens, k_lens, mask, key_starts, out, lse):
    q, k, v = inputs
    expected, expected_lse = masked_attention_varlen(
        q,
        k,
        v,
        cumulative(q_lens),
        cumulative(k_lens),
        mask,
        key_starts=key_starts,
        softmax_scale=q.shape[2] ** -0.5,
        dtype=torch.float64,
    )
    assert not out.isnan().any() and not lse.isnan().any(), "an output was not written"
    no_key = expected_lse.isneginf()
    assert torch.equal(lse.isneginf(), no_key)
    assert (out.transpose(0, 1)[no_key] == 0).all()
    # A wrong key of average weight moves the LSE of its row by 1 / keys of the row,
    # about 3e-3 here; float32 arithmetic moves it far less.
    difference = (lse - expected_lse)[~no_key].abs()
    assert difference.numel() == 0 or difference.max() < 2e-4
    # BF16 rounding of probabilities and outputs: some 1e-3 of a row's norm.
    error = (out - expected).norm(dim=-1)
    assert (error <= 2e-2 * expected.norm(dim=-1)).all()
    assert error.norm() <= 5e-3 * expected.norm()


def run_case(dims, num_heads, q_lens, k_lens, callback, causal, start_of=None):
    """One masked call and its check.

    ``callback`` is ``dense``, ``offset`` (start in the reserved word) or
    ``offset+key_starts`` (start in a second aux tensor). ``start_of`` gives request
    ``b``'s first key within the mask.
    """
    name = "dense" if callback == "dense" else "offset_dense"
    starts = [start_of(b) if start_of else 0 for b in range(len(q_lens))]
    keeps = [
        topk_rows(q, k, 0 if causal else k) for q, k in zip(q_lens, k_lens, strict=True)
    ]
    mask = pack(keeps, starts, reserve_word=callback == "offset")
    key_starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
    aux = [mask, key_starts] if callback == "offset+key_starts" else [mask]
    inputs = make_inputs(dims, num_heads, q_lens, k_lens)
    out, lse = attend(
        inputs, q_lens, k_lens, causal=causal, mask_mod=packed(name), aux=aux
    )
    check_against_float64(inputs, q_lens, k_lens, mask, key_starts, out, lse)


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("q_lens", [FEW, MIXED], ids=["few", "mixed"])
def test_all_keys_equal_the_unmasked_causal_kernel(dims, q_lens):
    inputs = make_inputs(dims, 16, q_lens, q_lens)
    keeps = [torch.ones((n, n), device="cuda").bool().tril() for n in q_lens]
    mask = pack(keeps, [0] * len(q_lens), reserve_word=False)
    out, lse = attend(
        inputs, q_lens, q_lens, causal=True, mask_mod=packed("dense"), aux=[mask]
    )
    plain_out, plain_lse = attend(inputs, q_lens, q_lens, causal=True)
    assert torch.equal(out, plain_out)
    assert torch.equal(lse, plain_lse)


# Key starts of their own differ from the reserved word only in where they are read.
KINDS = [
    *itertools.product(["dense", "offset"], ["causal", "full"], DIMS),
    ("offset+key_starts", "full", "192-128"),
]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("size", ["few", "mixed"])
def test_requests_of_all_lengths_with_empty_ones(kind, size):
    callback, causal, dims = kind[0], kind[1] == "causal", DIMS[kind[2]]
    q_lens, k_lens = (FEW, FEW_KEYS) if size == "few" else (MIXED, MIXED_KEYS)
    if causal:
        k_lens = q_lens
    start_of = None if callback == "dense" else (lambda b: 257 + 37 * b)
    run_case(dims, 4, q_lens, k_lens, callback, causal, start_of)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_request(length):
    run_case((192, 128), 16, [length], [length], "dense", causal=True)


@pytest.mark.parametrize("num_heads", [1, 64, 128])
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_head_counts(dims, num_heads):
    lengths = [300, 0, 1000, 129]
    run_case(dims, num_heads, lengths, lengths, "dense", causal=True)


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("callback", ["offset", "offset+key_starts"])
def test_every_key_start_modulo_128(dims, callback):
    # One request for each remainder, in one launch; 330 keys are several tiles.
    run_case(
        dims,
        2,
        [7] * 128,
        [330 - b % 5 for b in range(128)],
        callback,
        causal=False,
        start_of=lambda b: b + 128 * (b % 3),
    )


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries_are_those_of_repeated_keys(num_kv_heads):
    lengths, num_heads = [300, 0, 129], 4
    mask = pack([topk_rows(n, n, 0) for n in lengths], [0] * 3, reserve_word=False)
    q, k, v = make_inputs((192, 128), num_heads, lengths, lengths)
    few = k[:, :num_kv_heads].contiguous(), v[:, :num_kv_heads].contiguous()
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in few)
    masked = {"causal": True, "mask_mod": packed("dense"), "aux": [mask]}
    out, lse = attend((q, *few), lengths, lengths, **masked)
    starts = torch.zeros(3, dtype=torch.int32, device="cuda")
    check_against_float64((q, k, v), lengths, lengths, mask, starts, out, lse)


def test_the_diagonal_and_a_mask_that_crosses_it_both_apply():
    lengths = [300, 0, 1000]
    inputs = make_inputs((192, 128), 2, lengths, lengths)
    keeps = [torch.rand((n, n), device="cuda") < 0.5 for n in lengths]
    both = [keep & torch.ones_like(keep).tril() for keep in keeps]
    results = [
        attend(
            inputs,
            lengths,
            lengths,
            causal=True,
            mask_mod=packed("dense"),
            aux=[pack(masks, [0] * 3, reserve_word=False)],
        )
        for masks in (keeps, both)
    ]
    for crossing, causal in zip(*results):
        assert torch.equal(crossing, causal)


def _scalar_callback():
    from vllm_sparse_mla.codegen.word_callbacks import scalar_mask_mod

    return scalar_mask_mod


@pytest.mark.parametrize(
    "what, mask_mod, window",
    [
        ("does not support a window", lambda: packed("dense"), 64),
        ("does not support causal=True", _scalar_callback, None),
    ],
    ids=["window", "scalar-callback-causal"],
)
def test_what_is_not_supported_raises(what, mask_mod, window):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, k, v = make_inputs((192, 128), 4, [300], [300])
    mask = pack([topk_rows(300, 300, 0)], [0], reserve_word=False)
    with pytest.raises(NotImplementedError, match=what):
        flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cumulative([300]),
            cu_seqlens_k=cumulative([300]),
            max_seqlen_q=300,
            max_seqlen_k=300,
            causal=window is None,
            window_size=None if window is None else [window, 0],
            fa_version=4,
            mask_mod=mask_mod(),
            aux_tensors=[mask],
            aux_tensor_leading_dims=[2],
        )

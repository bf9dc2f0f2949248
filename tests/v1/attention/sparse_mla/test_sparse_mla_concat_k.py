# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""K as dense and masked MHA get it: the bits of stock's copies, in one pass."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention

COPIES_K = "stock makes K by two copies"

# (qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
MODELS = {"deepseek": (128, 64, 128), "glm": (192, 64, 256)}
NO_ROPE = (256, 0, 256)
RANK = 512
POISON = 0x5A5A
# As much as a program writes at most.
GUARD = 128 * 192

TOKENS_AND_HEADS = [
    *((tokens, heads) for tokens in (0, 1, 17) for heads in (1, 8, 16, 128)),
    *((4097, heads) for heads in (1, 8)),
    *(pytest.param(4097, heads, marks=pytest.mark.gpu) for heads in (16, 128)),
]


def bits(*shape, device, dtype=torch.bfloat16):
    """Any bit pattern, NaN of every payload too."""
    words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
    return words.view(dtype)


def same_bits(found, expected):
    return found.dtype == expected.dtype and torch.equal(
        found.view(torch.int16), expected.view(torch.int16)
    )


def parts_of_k(tokens, heads, dims, device, dtype=torch.bfloat16, first=0):
    """Columns of a projection to K and V, and of rows of latents."""
    nope, rope, v = dims
    joint = bits(tokens + first, heads, nope + v, device=device, dtype=dtype)
    latents = bits(tokens + first, 1, RANK + rope, device=device, dtype=dtype)
    return joint[first:, :, :nope], latents[first:, :, RANK:]


def by_torch(k_nope, k_pe):
    return torch.cat((k_nope, k_pe.expand(-1, k_nope.shape[1], -1)), dim=-1)


@pytest.fixture
def concat():
    name = "vllm.model_executor.kernels.attention.dsa.concat_mla_k"
    return importlib.import_module(name)


@pytest.mark.stock_fails(COPIES_K)
@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("tokens", "heads"), TOKENS_AND_HEADS)
def test_k_has_the_bits_of_its_parts(concat, device, tokens, heads, dims):
    k_nope, k_pe = parts_of_k(tokens, heads, dims, device)
    found = concat.concat_mla_k(k_nope, k_pe)
    assert found.is_contiguous()
    assert same_bits(found, by_torch(k_nope, k_pe))


@pytest.mark.stock_fails(COPIES_K)
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_the_kernel_writes_all_of_k_and_nothing_else(concat, device, tokens):
    parts = parts_of_k(tokens + 128, 3, (128, 64, 128), device)
    k_nope, k_pe = (part[:tokens] for part in parts)
    size = tokens * 3 * 192
    storage = torch.full((size + 2 * GUARD,), POISON, dtype=torch.int16, device=device)
    k = storage[GUARD:-GUARD].view(torch.bfloat16).view(tokens, 3, 192)
    concat.CONCAT_MLA_K_KERNEL(k, k_nope, k_pe)
    found = k.clone()
    k.view(torch.int16).fill_(POISON)
    assert (storage == POISON).all(), "an entry outside K changed"
    assert same_bits(found, by_torch(k_nope, k_pe))


@pytest.mark.stock_fails(COPIES_K)
@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "first"),
    [
        pytest.param(16, (128, 64, 128), torch.float16, 0, id="float16"),
        pytest.param(16, (128, 64, 128), torch.bfloat16, 3, id="after-decodes"),
        pytest.param(5, (128, 64, 128), torch.bfloat16, 0, id="five-heads"),
        pytest.param(2, (16, 16, 24), torch.bfloat16, 0, id="small-parts"),
        pytest.param(2, (24, 10, 7), torch.bfloat16, 1, id="unaligned"),
    ],
)
def test_other_inputs(concat, device, heads, dims, dtype, first):
    k_nope, k_pe = parts_of_k(130, heads, dims, device, dtype, first)
    found = concat.concat_mla_k(k_nope, k_pe)
    assert same_bits(found, by_torch(k_nope, k_pe))


@pytest.mark.stock_fails(COPIES_K)
@pytest.mark.parametrize(
    "change",
    [
        lambda k_nope, k_pe: (k_nope.float(), k_pe.float()),
        lambda k_nope, k_pe: (k_nope, k_pe.half()),
        lambda k_nope, k_pe: (k_nope, k_pe[:, 0]),
        lambda k_nope, k_pe: (k_nope, k_pe[:-1]),
        lambda k_nope, k_pe: (k_nope, k_pe[..., :0]),
        lambda k_nope, k_pe: (k_nope, k_pe[..., ::2]),
    ],
    ids=["float32", "two-types", "two-dims", "fewer-tokens", "no-rope", "strided"],
)
def test_what_it_does_not_take_is_refused_before_a_launch(concat, monkeypatch, change):
    monkeypatch.setattr(concat, "CONCAT_MLA_K_KERNEL", None)
    parts = change(*parts_of_k(3, 2, (128, 64, 128), "cpu"))
    with pytest.raises(ValueError, match=r"k_nope and k_pe must be .*; got torch"):
        concat.concat_mla_k(*parts)


@pytest.mark.stock_fails(COPIES_K)
@pytest.mark.gpu
def test_more_than_two_to_the_31_entries(concat, device):
    tokens, heads = 2**31 // (128 * 192) + 5, 128
    k_nope, k_pe = parts_of_k(tokens, heads, (128, 64, 128), device)
    found = concat.concat_mla_k(k_nope, k_pe)
    assert found.numel() > 2**31
    for rows in torch.arange(tokens, device=device).split(8192):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        assert same_bits(found[part], by_torch(k_nope[part], k_pe[part]))


# (prompt, start, stop) of each request
STEPS = {
    "pure": dict(spans=[(0, 0, 70), (1, 0, 130)]),
    "decodes-in-front": dict(spans=[(0, 0, 70)], decodes=3),
    "context-chunks": dict(spans=[(0, 37, 130), (1, 250, 300)], chunk_rows=160),
}


@pytest.fixture
def made(monkeypatch):
    """K of each call of the kernel's front."""
    found = []
    front = sparse_mla_attention.concat_mla_k

    def noted(k_nope, k_pe):
        found.append(front(k_nope, k_pe))
        return found[-1]

    monkeypatch.setattr(sparse_mla_attention, "concat_mla_k", noted)
    return found


@pytest.mark.stock_fails(COPIES_K)
@pytest.mark.parametrize("name", STEPS)
def test_masked_mha_takes_k_from_the_kernel_and_v_from_the_projection(
    make_world, request, monkeypatch, name
):
    world = make_world([420] * 2)
    made = request.getfixturevalue("made")
    taken = []
    attend = world.impl._run_masked_mha
    monkeypatch.setattr(
        world.impl,
        "_run_masked_mha",
        lambda **kwargs: (taken.append(kwargs), attend(**kwargs))[1],
    )
    step = world.step(**STEPS[name])
    world.assert_right(step, world.run(step))
    context = step.metadata.prefill.chunked_context
    assert len(taken) == 1 + (len(context.chunks) if context else 0)
    assert all(call["k"] is k for call, k in zip(taken, made, strict=True))
    dims = world.dims
    for call in taken:
        assert call["v"].stride() == (dims.num_heads * dims.kv_b_dim, dims.kv_b_dim, 1)


@pytest.mark.stock_fails(COPIES_K)
def test_dense_mha_takes_k_from_the_kernel(make_world, request):
    world = make_world([420] * 2)
    made = request.getfixturevalue("made")
    world.impl._sparse_mla_force_dense_mha = True
    step = world.step([(0, 0, 70), (1, 0, 130)])
    taken = {}

    def attend(q, k, v, **kwargs):
        taken.update(k=k, v=v)
        return v.new_zeros(v.shape)

    step.metadata.prefill.prefill_backend = SimpleNamespace(
        run_prefill_new_tokens=attend
    )
    world.forward(step, world.impl, world.new_output(step))
    assert len(made) == 1 and taken["k"] is made[0]
    rank = world.dims.kv_lora_rank
    joint = torch.nn.functional.linear(step.latents[:, :rank], world.weight)
    k_nope = joint.unflatten(-1, (world.dims.num_heads, -1))
    k_nope = k_nope[..., : world.dims.qk_nope_head_dim]
    assert same_bits(taken["k"], by_torch(k_nope, step.latents[:, None, rank:]))


def concat_of_the_layer(flashinfer=False):
    impl = object.__new__(sparse_mla_attention.SparseMLACommonImpl)
    impl._use_flashinfer_concat_mla_k = flashinfer
    return impl._concat_k_nope_k_pe


def test_k_without_a_rope_part_is_not_copied():
    k_nope, k_pe = parts_of_k(5, 2, NO_ROPE, "cpu")
    assert concat_of_the_layer()(k_nope, k_pe) is k_nope


def test_fp8_takes_stocks_copies():
    parts = parts_of_k(5, 2, (128, 64, 128), "cpu")
    parts = [part.float().nan_to_num(0).to(torch.float8_e4m3fn) for part in parts]
    found = concat_of_the_layer()(*parts)
    assert torch.equal(found.view(torch.uint8), by_torch(*parts).view(torch.uint8))


def test_flashinfers_kernel_is_taken_where_stock_takes_it(monkeypatch):
    taken = []
    operator = SimpleNamespace(flashinfer_concat_mla_k=lambda *args: taken.append(args))
    ops = SimpleNamespace(vllm=operator)
    monkeypatch.setattr(
        mla_attention, "torch", SimpleNamespace(empty=torch.empty, ops=ops)
    )
    parts = parts_of_k(5, 128, (128, 64, 128), "cpu")
    k = concat_of_the_layer(flashinfer=True)(*parts)
    assert len(taken) == 1 and taken[0][0] is k

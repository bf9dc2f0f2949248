# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The query of dense and masked MHA: the bits of stock's copy, without a copy.

Its RoPE part is rotated in place where MHA alone gets the query, by ``fused_q``.
"""

import importlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.stock_fails("stock copies the query for its RoPE part")

# (qk_nope_head_dim, qk_rope_head_dim)
MODELS = {"deepseek": (128, 64), "glm": (192, 64)}
NO_ROPE = (256, 0)
RANK = 512


def same_bits(found, expected):
    return found.dtype == expected.dtype and torch.equal(
        found.view(torch.int16), expected.view(torch.int16)
    )


def parts_of_q(tokens, heads, dims, device):
    """A query, and the columns that it is split into."""
    q = torch.randn(tokens, heads, sum(dims), device=device).bfloat16()
    return q, *q.split(dims, dim=-1)


def apart(part):
    """The same memory as a storage of its own, as weak references have it."""
    return torch.from_numpy(part.view(torch.int16).numpy())


@pytest.fixture
def mha_query():
    from vllm.models.deepseek_v32.common.mha_query import mha_query

    return mha_query


@pytest.mark.parametrize("dims", [*MODELS.values(), NO_ROPE], ids=str)
@pytest.mark.parametrize("tokens", [1, 17])
def test_parts_that_lie_side_by_side_are_one_query(mha_query, device, tokens, dims):
    q, q_nope, q_pe = parts_of_q(tokens, 4, dims, device)
    found = mha_query(q_nope[-1:], q_pe[-1:])
    assert found.data_ptr() == q[-1:].data_ptr()
    assert found.shape == q[-1:].shape and same_bits(found, q[-1:])


@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
def test_other_parts_are_copied(mha_query, dims):
    q, q_nope, q_pe = parts_of_q(17, 4, dims, "cpu")
    padded = torch.zeros(17, 4 * q.shape[2] + 8, dtype=q.dtype)
    padded[:, :-8] = q.flatten(1)
    by_rows = padded[:, :-8].view_as(q).split((q_nope.shape[2], q_pe.shape[2]), dim=-1)
    last_first = torch.cat((q_pe, q_nope), dim=-1)
    swapped = last_first.split((q_pe.shape[2], q_nope.shape[2]), dim=-1)[::-1]
    for parts in (
        (q_nope, q_pe.clone()),
        (q_nope.clone(), q_pe),
        (q_nope[1:], q_pe[:-1]),
        (q_nope, parts_of_q(17, 4, dims, "cpu")[2]),
        by_rows,
        swapped,
        (apart(q_nope), apart(q_pe)),
    ):
        found = mha_query(*parts)
        assert found.is_contiguous()
        assert found.data_ptr() not in (q.data_ptr(), padded.data_ptr())
        assert torch.equal(found, torch.cat(parts, dim=-1))


def fused_q(q_pe, ql_nope, positions, cache, **index):
    from vllm.models.deepseek_v32.common.kernels import fused_q

    arguments = dict(
        index_q=None,
        index_q_cos_sin_cache=None,
        index_weights=None,
        index_weights_softmax_scale=0.25,
        index_weights_head_scale=0.5,
    )
    return fused_q(
        positions,
        q_pe,
        cache,
        ql_nope=ql_nope,
        q_scale=torch.ones(1, device=q_pe.device),
        has_indexer=bool(index),
        quantize_mqa=False,
        **arguments | index,
    )


@dataclass
class Rotation:
    """What RoPE reads beside the query."""

    positions: torch.Tensor
    cache: torch.Tensor

    @classmethod
    def of(cls, tokens, device):
        positions = torch.randperm(tokens + 9, device=device)[:tokens]
        return cls(positions, torch.randn(tokens + 9, 64, device=device))


def rotated_apart(q_pe, rotation, **index):
    """RoPE's output where MQA gets the query, whose input stays as it is."""
    tokens, heads, _ = q_pe.shape
    product = torch.zeros(heads, tokens, RANK, dtype=q_pe.dtype, device=q_pe.device)
    before = q_pe.clone()
    *others, found = fused_q(
        q_pe, product.transpose(0, 1), rotation.positions, rotation.cache, **index
    )
    assert same_bits(q_pe, before) and not same_bits(found, before)
    assert found.is_contiguous()
    return *others, found


KERNELS = [
    "triton",
    pytest.param("cutedsl", marks=pytest.mark.gpu),
]


@pytest.fixture(params=KERNELS)
def rope_kernel(request, monkeypatch):
    """Which of ``fused_q``'s kernels runs."""
    if not torch.cuda.is_available():
        return
    name = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
    supported = request.param == "cutedsl"
    monkeypatch.setattr(
        importlib.import_module(name),
        "is_fused_q_cutedsl_supported",
        lambda *args, **kwargs: supported,
    )


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.gpu)])
def index(request, device):
    """An indexer's queries; without a GPU nothing rounds them to FP8."""
    if not request.param:
        return lambda tokens: {}

    def draw(tokens):
        return dict(
            index_q=torch.randn(tokens, 64, 128, device=device).bfloat16(),
            index_q_cos_sin_cache=torch.randn(tokens + 9, 64, device=device),
            index_weights=torch.randn(tokens, 64, device=device).bfloat16(),
        )

    return draw


@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
# Triton's kernel has a program for each token: more of them are CuTe DSL's case.
@pytest.mark.parametrize("tokens", [1, 17, pytest.param(130, marks=pytest.mark.gpu)])
def test_rope_is_in_place_for_mha_and_gives_the_same_bits(
    device, rope_kernel, index, tokens, dims
):
    q, q_nope, q_pe = parts_of_q(tokens, 16, dims, device)
    rotation, indexed = Rotation.of(tokens, device), index(tokens)
    *others, expected = rotated_apart(q_pe, rotation, **indexed)
    nope = q_nope.clone()
    *also, found = fused_q(q_pe, q_nope, rotation.positions, rotation.cache, **indexed)
    assert found.data_ptr() == q_pe.data_ptr()
    assert same_bits(found, expected)
    assert same_bits(q, torch.cat((nope, expected), dim=-1))
    if indexed:
        for one, other in zip(others, also, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def attend(monkeypatch, device):
    """Takes a query through the model's layer; returns what MHA gets."""
    module = importlib.import_module("vllm.models.deepseek_v32.attention")
    metadata = SimpleNamespace(num_actual_tokens=1)
    context = (metadata, None, None, None)
    monkeypatch.setattr(module, "get_attention_context", lambda name: context)
    nothing = torch.empty(0, device=device)

    def call(q_nope, q_pe, mqa_q, positions=None, rotary_emb=None):
        taken = []
        layer = SimpleNamespace(
            indexer=None,
            layer_name="layer",
            use_pcp=False,
            rotary_emb=rotary_emb,
            impl=SimpleNamespace(
                record_logical_topk_ready=lambda: None,
                prepare_for_batch=lambda metadata: None,
            ),
            _use_sparse_mha=lambda metadata: True,
            forward_impl=lambda q, *args: taken.append(q),
        )
        module.DeepseekV32Attention._sparse_indexer_and_attn(
            layer, positions, nothing, q_nope, q_pe, None, None, None, nothing,
            nothing, q_nope, mqa_q, nothing,
        )  # fmt: skip
        return taken[0]

    return call


@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
def test_the_layer_hands_the_query_on_as_it_lies(device, attend, dims):
    q, q_nope, q_pe = parts_of_q(17, 4, dims, device)
    rotation = Rotation.of(17, device)
    (*_, expected) = rotated_apart(q_pe, rotation)
    expected = torch.cat((q_nope, expected), dim=-1)
    *_, mqa_q = fused_q(q_pe, q_nope, rotation.positions, rotation.cache)
    found = attend(q_nope, q_pe, mqa_q)
    assert found.data_ptr() == q.data_ptr()
    assert found.stride() == expected.stride() and same_bits(found, expected)


def test_what_was_made_for_mqa_is_copied(device, attend):
    """As in the replay of a CUDA graph, which was captured for both."""
    q, q_nope, q_pe = parts_of_q(17, 4, (128, 64), device)
    rotation = Rotation.of(17, device)
    (*_, mqa_q) = rotated_apart(q_pe, rotation)
    found = attend(q_nope, q_pe, mqa_q)
    assert same_bits(found, torch.cat((q_nope, mqa_q), dim=-1))
    fp8 = mqa_q.to(torch.float8_e4m3fn)
    found = attend(q_nope, q_pe, fp8, rotation.positions, lambda *args: (mqa_q, None))
    assert same_bits(found, torch.cat((q_nope, mqa_q), dim=-1))

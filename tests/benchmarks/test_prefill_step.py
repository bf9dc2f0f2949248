# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Masked MHA and both sparse MQA backends compute one and the same attention.

Everything is vLLM's but the kernels, which plain torch stands in for.
"""

import pytest
import torch
from prefill_batches import parse_batch
from prefill_step import LATENT, Prefill, _exact_in_fp8, backend_classes, make_step

from vllm import _custom_ops
from vllm.platforms.interface import DeviceCapability
from vllm_sparse_mla.testing import kv_cache, reference
from vllm_sparse_mla.testing.stand_ins import noted_attention

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the GPU runs the benchmark"
)


def attend_over_rows(q, k, v, q_v, seqused_k, block_table, softmax_scale, **kwargs):
    """FA3 over pages of one token, latent values given apart."""
    out = torch.empty_like(q_v)
    for token, count in enumerate(seqused_k.tolist()):
        rows = block_table[token, :count].long()
        keys, values = k.flatten(0, 2)[rows].float(), v.flatten(0, 2)[rows].float()
        scores = q[token].float() @ keys.t() + q_v[token].float() @ values.t()
        out[token] = (scores * softmax_scale).softmax(-1) @ values
    return out


def flash_mla(q, cache, indices, scale, topk_length=None, out=None):
    """FlashMLA's sparse prefill: padded heads, one index row a token."""
    rows, rope = cache[:, None], q[..., LATENT:]
    padded = attend_over_rows(
        rope, rows[..., LATENT:], rows[..., :LATENT], q[..., :LATENT], topk_length,
        indices[:, 0], scale,
    )  # fmt: skip
    return padded, None, padded.new_zeros(q.shape[:2])


def concat_mla_q(nope, rope, out):
    """The copy into the padded query buffer."""
    out.zero_()
    out[:, : nope.shape[1]] = torch.cat((nope, rope), -1)


@pytest.fixture
def backends(monkeypatch):
    """The backends of SM90, their kernels replaced."""
    found = backend_classes(DeviceCapability(9, 0))
    from vllm.v1.attention.backends.mla import flashattn_mla_sparse, flashmla_sparse

    monkeypatch.setattr(
        flashattn_mla_sparse, "flash_attn_varlen_func", attend_over_rows
    )
    monkeypatch.setattr(flashmla_sparse, "flash_mla_sparse_fwd", flash_mla)
    monkeypatch.setattr(_custom_ops, "concat_mla_q", concat_mla_q, raising=False)
    return found


@pytest.mark.parametrize(
    ("model", "text", "topk"),
    [
        ("deepseek", "q24s2085", 2048),
        ("glm", "q24s2085", 2048),
        ("deepseek", "q140,2q9s150,q3s200", 128),
    ],
)
def test_all_ways_agree(backends, model, text, topk):
    step = make_step(model, 1, parse_batch(text), topk)
    prefill = Prefill(step, torch.device("cpu"))
    assert prefill.masks_fit() and prefill.num_chunks == 1
    calls = []
    attend = reference.flash_attn_varlen_func
    with noted_attention(calls, attend, cache_ops=False):
        expected = prefill.masked_mha()().float()
        prefill.output.fill_(torch.nan)
        one_call = prefill.masked_mha_in_parts(0)().float()
    apart = ["offset_dense_mask_mod"] * 2
    assert [call.callback for call in calls] == [*apart, "dense_mask_mod"]
    assert float((one_call - expected).norm() / expected.norm()) < 1e-2
    assert set(backends) == {"FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"}
    for name, backend in backends.items():
        prefill.output.fill_(torch.nan)
        out = prefill.sparse_mqa(backend)().float()
        assert float((out - expected).norm() / expected.norm()) < 1e-2, name


@pytest.mark.parametrize(
    ("text", "kv_cache_dtype"), [("q70", "auto"), ("q3,q70s170", "fp8_ds_mla")]
)
def test_one_call_is_refused_where_there_is_none(text, kv_cache_dtype):
    step = make_step("deepseek", 1, parse_batch(text), 64, kv_cache_dtype)
    prefill = Prefill(step, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no context, a quantized cache"):
        prefill.masked_mha_in_parts(0)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "expected"),
    [("fp8_ds_mla", {"FLASHMLA_SPARSE"}), ("fp8", set())],
)
def test_backends_are_those_of_the_cache(kv_cache_dtype, expected):
    assert set(backend_classes(DeviceCapability(9, 0), kv_cache_dtype)) == expected


def test_quantized_caches_hold_the_latents_exactly():
    latents = _exact_in_fp8(torch.randn(50, 576, dtype=torch.bfloat16))
    groups = latents[:, :LATENT].unflatten(1, (4, 128)).float()
    scale = groups.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    stored = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(stored, groups)
    assert torch.equal(latents.to(torch.float8_e4m3fn).to(latents.dtype), latents)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla", "fp8"])
def test_pages_hold_the_latents(kv_cache_dtype):
    step = make_step("deepseek", 1, parse_batch("q3,q70s170"), 64, kv_cache_dtype)
    prefill = Prefill(step, torch.device("cpu"))
    position = torch.arange(100, 170)
    rows = prefill.cache[prefill.block_table[0][position // 64], position % 64]
    found = kv_cache.read_latents(rows, kv_cache_dtype, prefill.k_scale)
    assert torch.equal(found, prefill.latents[:70].double())


@pytest.mark.parametrize("topk", [2048, 512])
@pytest.mark.parametrize("text", ["q1", "q3000", "q70s2170,q600s700", "2q100s2100"])
def test_operations_are_counted(text, topk):
    batch = parse_batch(text)
    step = make_step("glm", 16, batch, topk)
    visible = [c + i + 1 for q, c in batch.requests for i in range(q)]
    wide = LATENT * (192 + 256)
    assert step.mha_flops == 2 * 16 * (512 * sum(visible) + wide * step.keys)
    selected = sum(min(count, topk) for count in visible)
    assert step.mqa_flops == 2 * 16 * (1088 * selected + wide * step.queries)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Masked MHA and both sparse MQA backends compute one and the same attention.

Everything is vLLM's but the kernels, which plain torch stands in for.
"""

import pytest
import torch
from mask_cases import TOPK
from prefill_step import LATENT, MODELS, Prefill, Step, backend_classes

from vllm import _custom_ops
from vllm.platforms.interface import DeviceCapability
from vllm_sparse_mla.testing import reference
from vllm_sparse_mla.testing.stand_ins import noted_attention

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the benchmark"),
]


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


@pytest.mark.parametrize("model", MODELS)
def test_all_ways_agree(backends, model):
    step = Step(MODELS[model], MODELS[model].num_heads, queries=24, context=TOPK + 13)
    prefill = Prefill(step, "uniform", torch.device("cpu"))
    calls = []
    attend = reference.flash_attn_varlen_func
    with noted_attention(calls, attend, cache_ops=False):
        expected = prefill.masked_mha()().float()
    assert [call.callback for call in calls] == ["offset_dense_mask_mod"] * 2
    assert set(backends) == {"FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"}
    for name, backend in backends.items():
        prefill.output.fill_(torch.nan)
        out = prefill.sparse_mqa(backend)().float()
        assert float((out - expected).norm() / expected.norm()) < 1e-2, name


@pytest.mark.cpu
@pytest.mark.parametrize("shape", [(1, 0), (3000, 0), (70, 2100), (100, 2000)])
def test_operations_are_counted(shape):
    queries, context = shape
    step = Step(MODELS["glm"], 4, queries, context)
    visible = [context + i + 1 for i in range(queries)]
    wide = LATENT * (192 + 256)
    assert step.mha_flops == 2 * 16 * (512 * sum(visible) + wide * step.keys)
    selected = sum(min(count, TOPK) for count in visible)
    assert step.mqa_flops == 2 * 16 * (1088 * selected + wide * queries)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One request's prefill attention in one layer, by vLLM's own classes.

Every way gets the same queries, latents, projection weights, paged cache and top-k
rows, and writes one output of all heads:

- masked MHA is the layer's ``forward_mha``: K/V projection and concatenation, mask
  build, FA4, with context also the gather from the cache, a second projection and FA4
  call, and the merge;
- sparse MQA is a backend's ``forward_mqa`` between the two products that its caller
  makes: absorb, index conversion, (concatenation and padding of heads,) the backend's
  kernel, value-up.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from mask_cases import TOPK, cumulative, topk_rows, visible_keys

from vllm_sparse_mla.testing.mla_layer import make_masked_layer
from vllm_sparse_mla.testing.stock import load_stock_module

LAYER_MODULE = "vllm.model_executor.layers.attention.sparse_mla_attention"
MASK_MODULE = "vllm.model_executor.layers.attention.sparse_mla_mask"
LATENT = 512
BLOCK_SIZE = 64
MASK_WORKSPACE_WORDS = 128 * 2**20 // 4  # as vLLM's metadata builder has
CONTEXT_WORKSPACE_ROWS = 64 * 1024  # likewise, its upper bound


@dataclass(frozen=True)
class Model:
    """Dimensions of one MLA model; `num_heads` over all tensor-parallel ranks."""

    name: str
    num_heads: int
    nope: int
    rope: int
    v: int

    @property
    def qk(self) -> int:
        """Head dimension of Q and K."""
        return self.nope + self.rope


MODELS = {
    "deepseek": Model("DeepSeek-V3.2", 128, 128, 64, 128),
    "glm": Model("GLM-5.x", 64, 192, 64, 256),
}


@dataclass(frozen=True)
class Step:
    """One rank's share of a prefill.

    Attributes:
        model: whose dimensions.
        ranks: tensor-parallel size.
        queries: new tokens.
        context: tokens before them.
    """

    model: Model
    ranks: int
    queries: int
    context: int

    @property
    def heads(self) -> int:
        """Heads of this rank."""
        return self.model.num_heads // self.ranks

    @property
    def keys(self) -> int:
        """Tokens of the sequence."""
        return self.queries + self.context

    @property
    def mha_flops(self) -> int:
        """Of masked MHA: both products over all causal pairs, and the projection."""
        pairs = self.queries * self.context + self.queries * (self.queries + 1) // 2
        wide = self.model.nope + self.model.v
        attention = (self.model.qk + self.model.v) * pairs
        return 2 * self.heads * (attention + LATENT * wide * self.keys)

    @property
    def mqa_flops(self) -> int:
        """Of sparse MQA: both products over the top-k, absorb and value-up."""
        first = self.context + 1
        short = max(0, min(self.queries, TOPK - self.context))
        pairs = short * (2 * first + short - 1) // 2 + (self.queries - short) * TOPK
        wide = self.model.nope + self.model.v
        attention = (2 * LATENT + self.model.rope) * pairs
        return 2 * self.heads * (attention + LATENT * wide * self.queries)

    @property
    def num_bytes(self) -> int:
        """Queries, output, latents of the sequence and top-k rows, once each."""
        per_query = 2 * self.heads * (self.model.qk + self.model.v) + 4 * TOPK
        return self.queries * per_query + self.keys * 2 * (LATENT + self.model.rope)


@functools.cache
def _vllm_config(device_type: str):
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device=device_type))


@functools.cache
def _workspace_manager(device: torch.device) -> None:
    """Give vLLM's backends their shared scratch memory."""
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(device)


@functools.lru_cache(maxsize=1)
def _topk(queries: int, context: int, kind: str, device) -> torch.Tensor:
    """Top-k rows of a causal prefill, int32 ``[queries, TOPK]``."""
    torch.manual_seed(0)
    visible = visible_keys(queries, queries + context, True, device)
    parts = visible.split(2048)
    return torch.cat([topk_rows(part, kind) for part in parts])


def backend_classes(capability) -> dict[str, type]:
    """Sparse MQA backends of this vLLM for DeepSeek's cache that support a GPU."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
    found = {}
    for name in names:
        try:
            backend = AttentionBackendEnum[name].get_class()
        except ImportError as error:
            print(f"{name} cannot be imported: {error}", file=sys.stderr)
            continue
        if backend.supports_compute_capability(capability):
            found[name] = backend
    return found


class Prefill:
    """Tensors and metadata of a step, and the ways to attend."""

    def __init__(self, step: Step, kind: str, device: torch.device) -> None:
        """Makes them.

        Args:
            step: what to prefill.
            kind: of the top-k rows, see ``mask_cases``.
            device: where.
        """
        self.step, self.device = step, device
        model, heads = step.model, step.heads
        self.topk = _topk(step.queries, step.context, kind, device)
        torch.manual_seed(0)
        self.q = self._randn(step.queries, heads, model.qk)
        wide = model.nope + model.v
        self.weight = self._randn(heads * wide, LATENT).mul_(LATENT**-0.5)
        # What sparse MQA needs of it: views, as vLLM's layer has them.
        per_head = self.weight.t().view(LATENT, heads, wide)
        w_uk, w_uv = per_head.split([model.nope, model.v], dim=-1)
        self.w_uk_t, self.w_uv = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)
        self.latent_dim = LATENT + model.rope
        latents = self._randn(step.keys, self.latent_dim)
        self.latents = latents[step.context :]
        num_blocks = -(-step.keys // BLOCK_SIZE)
        self.block_table = torch.randperm(num_blocks, device=device).int()[None]
        self.cache = self._randn(num_blocks, BLOCK_SIZE, self.latent_dim)
        positions = torch.arange(step.keys, device=device)
        blocks = self.block_table[0].long()[positions // BLOCK_SIZE]
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        self.cache.view(-1, self.latent_dim)[slots] = latents
        self.output = torch.empty(
            step.queries, heads * model.v, dtype=torch.bfloat16, device=device
        )
        self.k_scale = torch.ones(1, device=device)
        self.prefill = self._prefill_metadata()

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def _prefill_metadata(self):
        from vllm.model_executor.layers.attention import sparse_mla_attention as layer
        from vllm.model_executor.layers.attention.mla_attention import (
            build_mla_chunked_context_metadata,
        )

        step, ends = self.step, cumulative([self.step.queries], "cpu")
        context = None
        if step.context:
            context = build_mla_chunked_context_metadata(
                context_lens_cpu=torch.tensor([step.context], dtype=torch.int32),
                prefill_query_start_loc_cpu=ends,
                chunked_prefill_workspace=self.cache.new_empty(
                    CONTEXT_WORKSPACE_ROWS, self.latent_dim
                ),
                chunked_prefill_workspace_size=CONTEXT_WORKSPACE_ROWS,
                block_size=BLOCK_SIZE,
                align_chunk_to_block=True,
                device=self.device,
                dcp_world_size=1,
                dcp_local_block_size=1,
                dcp_virtual_block_size=1,
            )
        return layer.SparseMLAPrefillMetadata(
            block_table=self.block_table,
            query_start_loc=ends.to(self.device),
            max_query_len=step.queries,
            query_lens_cpu=ends.diff(),
            chunked_context=context,
            topk_mask_workspace=torch.zeros(
                MASK_WORKSPACE_WORDS, dtype=torch.int32, device=self.device
            ),
        )

    def _metadata(self, cls: type):
        step = self.step
        return cls(
            num_reqs=1,
            max_query_len=step.queries,
            max_seq_len=step.keys,
            num_actual_tokens=step.queries,
            query_start_loc=self.prefill.query_start_loc,
            slot_mapping=torch.empty(0),
            block_table=self.block_table,
            req_id_per_token=torch.zeros(
                step.queries, dtype=torch.int32, device=self.device
            ),
            block_size=BLOCK_SIZE,
            topk_tokens=TOPK,
            num_decodes=0,
            num_prefills=1,
            num_decode_tokens=0,
            prefill_max_seq_len=step.keys,
            prefill=self.prefill,
        )

    def _impl(self, cls: type):
        """A layer of a class, as vLLM makes it on one rank."""
        from vllm.config import set_current_vllm_config

        model = self.step.model
        config = _vllm_config(self.device.type)
        config.scheduler_config.max_num_batched_tokens = self.step.queries
        # No distributed set-up: the layer asks for nothing but the size.
        common = next(c for c in cls.__mro__ if c.__name__ == "SparseMLACommonImpl")
        names = common.__init__.__globals__
        one_rank = {"get_tensor_model_parallel_world_size": lambda: 1}
        with mock.patch.dict(names, one_rank), set_current_vllm_config(config):
            return make_masked_layer(
                cls,
                num_heads=self.step.heads,
                kv_lora_rank=LATENT,
                qk_nope_head_dim=model.nope,
                qk_rope_head_dim=model.rope,
                v_head_dim=model.v,
                kv_b_weight=self.weight,
                topk_indices_buffer=self.topk,
            )

    def masked_mha(self) -> Callable[[], torch.Tensor]:
        """This project's masked MHA."""
        return self._masked_mha(importlib.import_module(LAYER_MODULE))

    def stock_masked_mha(self) -> Callable[[], torch.Tensor]:
        """The installed vLLM's masked MHA, with its own callbacks."""
        attend = self._masked_mha(load_stock_module(LAYER_MODULE))
        modules = {MASK_MODULE: load_stock_module(MASK_MODULE)}

        def with_stock_callbacks() -> torch.Tensor:
            with mock.patch.dict(sys.modules, modules):
                return attend()

        return with_stock_callbacks

    def _masked_mha(self, module) -> Callable[[], torch.Tensor]:
        impl = self._impl(module.SparseMLACommonImpl)
        metadata = self._metadata(module.SparseMLACommonMetadata)
        kv_c, k_pe = self.latents[:, :LATENT], self.latents[:, None, LATENT:]

        def attend() -> torch.Tensor:
            impl.forward_mha(
                self.q, kv_c, k_pe, self.cache, metadata, self.k_scale, self.output
            )
            return self.output

        return attend

    def sparse_mqa(self, backend: type) -> Callable[[], torch.Tensor]:
        """A backend's sparse MQA between its caller's products."""
        _workspace_manager(self.device)
        impl = self._impl(backend.get_impl_cls())
        metadata = self._metadata(backend.get_builder_cls().metadata_cls)
        step, model = self.step, self.step.model
        scales = SimpleNamespace(_q_scale_float=1.0, _k_scale_float=1.0)
        by_head = self.output.view(-1, step.heads, model.v).transpose(0, 1)

        def attend() -> torch.Tensor:
            q_nope, q_pe = self.q.split([model.nope, model.rope], dim=-1)
            absorbed = self.q.new_empty(step.queries, step.heads, LATENT)
            torch.bmm(q_nope.transpose(0, 1), self.w_uk_t, out=absorbed.transpose(0, 1))
            latent_out, _ = impl.forward_mqa(
                (absorbed, q_pe), self.cache, metadata, scales
            )
            latent_out = latent_out.view(-1, step.heads, LATENT).transpose(0, 1)
            torch.bmm(latent_out, self.w_uv, out=by_head)
            return self.output

        return attend

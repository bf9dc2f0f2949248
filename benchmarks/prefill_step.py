# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill attention of a step in one layer, by vLLM's own classes.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import torch
from mask_cases import TOPK, topk_rows, visible_keys
from prefill_batches import Batch
from torch.nn.utils.rnn import pad_sequence

from vllm_sparse_mla.testing.layer import DEEPSEEK, GLM, Dims, make_layer
from vllm_sparse_mla.testing.served import CONTEXT_ROWS
from vllm_sparse_mla.testing.stock import load_stock_module
from vllm_sparse_mla.testing.world import encode_latents, plan_step

LAYER_MODULE = "vllm.model_executor.layers.attention.sparse_mla_attention"
MASK_MODULE = "vllm.model_executor.layers.attention.sparse_mla_mask"
LATENT = DEEPSEEK.kv_lora_rank  # and GLM's
BLOCK_SIZE = 64
TOPK_ROWS = "uniform"  # of mask_cases.py
MASK_WORKSPACE_WORDS = 128 * 2**20 // 4  # as vLLM's metadata builder has
MAX_MODEL_LEN = 163840  # DeepSeek-V3.2's
FP8_DS_MLA_GROUP = 128  # latents that share a scale


# Whole models, and what pages call them.
MODELS = {"deepseek": DEEPSEEK, "glm": GLM}
NAMES = {"deepseek": "DeepSeek-V3.2", "glm": "GLM-5.x"}


@dataclass(frozen=True)
class Step:
    """One rank's share of the prefills of a step."""

    model: str  # a key of `MODELS`
    dims: Dims  # of its layer on the rank
    batch: Batch  # the requests

    def __str__(self) -> str:
        return (
            f"{NAMES[self.model]}, {self.dims.num_heads} heads, top-k "
            f"{self.dims.index_topk}, {self.dims.kv_cache_dtype}: {self.batch}"
        )

    @property
    def queries(self) -> int:
        """New tokens of all requests."""
        return sum(self.batch.query_lens)

    @property
    def keys(self) -> int:
        """Tokens of all requests."""
        return sum(self.batch.seq_lens)

    @property
    def mha_flops(self) -> int:
        """Of masked MHA: both products over all causal pairs, and the projection."""
        d = self.dims
        pairs = sum(q * c + q * (q + 1) // 2 for q, c in self.batch.requests)
        attention = (d.qk_head_dim + d.v_head_dim) * pairs
        return 2 * d.num_heads * (attention + LATENT * d.kv_b_dim * self.keys)

    @property
    def mqa_flops(self) -> int:
        """Of sparse MQA: both products over the top-k, absorb and value-up."""
        d = self.dims
        pairs = selected_pairs(self.batch.requests, d.index_topk)
        attention = (LATENT + d.latent_dim) * pairs
        return 2 * d.num_heads * (attention + LATENT * d.kv_b_dim * self.queries)

    @property
    def num_bytes(self) -> int:
        """Queries, output, latents of the sequences and top-k rows, once each."""
        d = self.dims
        per_query = 2 * d.num_heads * (d.qk_head_dim + d.v_head_dim) + 4 * d.index_topk
        return self.queries * per_query + self.keys * 2 * d.latent_dim


def make_step(
    model: str, heads: int, batch: Batch, topk: int = TOPK, kv_cache_dtype: str = "auto"
) -> Step:
    """A step of a rank that has so many heads."""
    dims = replace(
        MODELS[model], num_heads=heads, index_topk=topk, kv_cache_dtype=kv_cache_dtype
    )
    return Step(model, dims, batch)


@functools.cache
def _vllm_config(device_type: str):
    from vllm.config import DeviceConfig, VllmConfig

    config = VllmConfig(device_config=DeviceConfig(device=device_type))
    # FlashMLA sizes the workspace for its quantized cache by these.
    config.model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    return config


@functools.cache
def _workspace_manager(device: torch.device) -> None:
    """Give vLLM's backends their shared scratch memory."""
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(device)


@functools.lru_cache(maxsize=1)
def _topk(batch: Batch, topk: int, device) -> torch.Tensor:
    """Top-k rows of causal prefills, int32 ``[queries, topk]``."""
    torch.manual_seed(0)
    visible = [
        visible_keys(queries, queries + context, True, device)
        for queries, context in batch.requests
    ]
    parts = torch.cat(visible).split(2048)
    return torch.cat([topk_rows(part, TOPK_ROWS, topk) for part in parts])


def selected_pairs(requests: Iterable[tuple[int, int]], topk: int) -> int:
    """Pairs of query and selected key, of requests with new and cached tokens."""
    total = 0
    for queries, context in requests:
        short = max(0, min(queries, topk - context))  # queries that see fewer
        total += short * (2 * context + short + 1) // 2 + (queries - short) * topk
    return total


def _exact_in_fp8(latents: torch.Tensor) -> torch.Tensor:
    """The latents moved to values that every FP8 cache holds exactly.

    Suffix and context then come from the same values, quantized or not: 3.5, the
    largest, makes each group's scale of ``fp8_ds_mla`` a power of two.
    """
    largest = 3.5
    latents = latents.clamp(-largest, largest)
    latents[:, :LATENT:FP8_DS_MLA_GROUP] = largest
    return latents.to(torch.float8_e4m3fn).to(latents.dtype)


def backend_classes(capability, kv_cache_dtype: str = "auto") -> dict[str, type]:
    """Sparse MQA backends of this vLLM that support a GPU and a KV cache dtype."""
    from vllm.model_executor.layers.attention.mla_attention import (
        _canonicalize_sparse_mla_kv_cache_dtype as canonical,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
    found = {}
    for name in names:
        try:
            backend = AttentionBackendEnum[name].get_class()
        except ImportError as error:
            print(f"{name} cannot be imported: {error}", file=sys.stderr)
            continue
        if (
            backend.supports_compute_capability(capability)
            and kv_cache_dtype in backend.supported_kv_cache_dtypes
            and canonical(backend, kv_cache_dtype) == kv_cache_dtype
        ):
            found[name] = backend
    return found


class Prefill:
    """Tensors and metadata of a step, and the ways to attend."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step, self.device = step, device
        dims, heads = step.dims, step.dims.num_heads
        self.topk = _topk(step.batch, dims.index_topk, device)
        torch.manual_seed(0)
        self.q = self._randn(step.queries, heads, dims.qk_head_dim)
        self.weight = self._randn(heads * dims.kv_b_dim, LATENT).mul_(LATENT**-0.5)
        # What sparse MQA needs of it: views, as vLLM's layer has them.
        per_head = self.weight.t().view(LATENT, heads, dims.kv_b_dim)
        w_uk, w_uv = per_head.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
        self.w_uk_t, self.w_uv = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)
        self.k_scale = torch.ones(1, device=device)
        self._fill_cache()
        self.output = torch.empty(
            step.queries, heads * dims.v_head_dim, dtype=torch.bfloat16, device=device
        )
        self.context_workspace = self.q.new_empty(CONTEXT_ROWS, dims.latent_dim)
        self.mask_workspace = torch.zeros(
            MASK_WORKSPACE_WORDS, dtype=torch.int32, device=device
        )
        self.prefill = self._metadata().prefill

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def _fill_cache(self) -> None:
        """Latents of every sequence, in the cache's pages and format."""
        step, device = self.step, self.device
        dtype = step.dims.kv_cache_dtype
        latents = self._randn(step.keys, step.dims.latent_dim)
        if dtype != "auto":
            latents = _exact_in_fp8(latents)
        rows = encode_latents(step.dims, latents, self.k_scale)
        pages = [-(-tokens // BLOCK_SIZE) for tokens in step.batch.seq_lens]
        order = torch.randperm(sum(pages), dtype=torch.int32, device=device)
        self.block_table = pad_sequence(order.split(pages), batch_first=True)
        slots, new = [], []
        for row, (queries, context) in zip(self.block_table, step.batch.requests):
            position = torch.arange(context + queries, device=device)
            page = row.long()[position // BLOCK_SIZE]
            slots.append(page * BLOCK_SIZE + position % BLOCK_SIZE)
            new.append(position >= context)
        self.cache = rows.new_zeros(sum(pages), BLOCK_SIZE, rows.shape[1])
        self.cache.flatten(0, 1)[torch.cat(slots)] = rows
        if dtype not in ("auto", "fp8_ds_mla"):
            self.cache = self.cache.view(torch.float8_e4m3fn)
        self.latents = latents[torch.cat(new)]

    def _metadata(self, cls: type | None = None):
        """Metadata of a class; None is the one that all sparse-MLA layers share."""
        batch = self.step.batch
        return plan_step(
            batch.query_lens,
            batch.context_lens,
            self.block_table,
            block_size=BLOCK_SIZE,
            topk=self.step.dims.index_topk,
            context_workspace=self.context_workspace,
            mask_workspace=self.mask_workspace,
            cls=cls,
        )

    def _add_fp8_metadata(self, metadata, builder: type) -> None:
        """What FlashMLA's builder adds for its quantized cache, made by it."""
        from vllm.v1.attention.backends.mla import flashmla_sparse

        lens = torch.tensor(self.step.batch.seq_lens, dtype=torch.int32)
        own = SimpleNamespace(
            vllm_config=_vllm_config(self.device.type),
            device=self.device,
            pcp_dcp_kv_gather=False,
            max_model_len_tensor=lens.new_full((1,), MAX_MODEL_LEN).to(self.device),
            dummy_block_table=torch.empty_like(self.block_table[:1, :1]),
        )
        common = SimpleNamespace(
            num_actual_tokens=self.step.queries,
            query_start_loc_cpu=metadata.query_start_loc.cpu(),
            seq_lens_cpu_upper_bound=lens,
            block_table_tensor=self.block_table,
            seq_lens=lens.to(self.device),
        )
        mixed = self.step.dims.num_heads < flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL
        metadata.fp8_use_mixed_batch = mixed
        metadata.fp8_extra_metadata = (
            builder._build_fp8_mixed_decode_prefill(own)
            if mixed
            else builder._build_fp8_separate_prefill_decode(own, common, metadata)
        )

    def _impl(self, cls: type):
        """A layer of a class, as vLLM makes it on one rank."""
        config = _vllm_config(self.device.type)
        config.scheduler_config.max_num_batched_tokens = self.step.queries
        return make_layer(
            cls, self.step.dims, self.weight, config, topk_indices_buffer=self.topk
        )

    @functools.cached_property
    def num_chunks(self) -> int:
        """Chunks of cached tokens that masked MHA attends to by themselves."""
        layer = importlib.import_module(LAYER_MODULE).SparseMLACommonImpl
        context = self.prefill.chunked_context
        if context is None or self._impl(layer)._takes_one_pass(self.prefill):
            return 0
        return len(context.chunks)

    @property
    def max_splits(self) -> int:
        """Most parts in which the layer takes cached keys on this device."""
        from vllm.model_executor.layers.attention import sparse_mla_sm90

        if not sparse_mla_sm90.sm90_masked_mha_enabled():
            return 1
        return sparse_mla_sm90.MAX_CONTEXT_SPLITS

    def masks_fit(self) -> bool:
        """Whether vLLM's mask workspace has room for the batch."""
        layer = importlib.import_module(LAYER_MODULE)
        return layer.SparseMLACommonImpl.masked_mha_workspace_fits(self.prefill)

    def masked_mha(self) -> Callable[[], torch.Tensor]:
        """This project's masked MHA."""
        return self._masked_mha(importlib.import_module(LAYER_MODULE))

    def masked_mha_in_parts(self, parts: int) -> Callable[[], torch.Tensor]:
        """The same, with so many parts of the cached keys whatever the chunk.

        New tokens are attended to apart from them; 0 parts are one call for both.

        Raises:
            RuntimeError: there cannot be one call.
        """
        one_pass = parts == 0
        if one_pass and (
            self.prefill.chunked_context is None
            or self.step.keys > CONTEXT_ROWS
            or self.step.dims.kv_cache_dtype != "auto"
        ):
            raise RuntimeError("no context, a quantized cache, or too long sequences")
        attend, module = self.masked_mha(), importlib.import_module(LAYER_MODULE)
        decided = dict(
            context_splits=lambda *_: parts, takes_one_pass=lambda *_: one_pass
        )

        def with_parts() -> torch.Tensor:
            with mock.patch.multiple(module, **decided):
                return attend()

        return with_parts

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
        builder = backend.get_builder_cls()
        metadata = self._metadata(builder.metadata_cls)
        if self.step.dims.kv_cache_dtype == "fp8_ds_mla":
            self._add_fp8_metadata(metadata, builder)
        dims, queries = self.step.dims, self.step.queries
        heads = dims.num_heads
        parts = (dims.qk_nope_head_dim, dims.qk_rope_head_dim)
        scales = SimpleNamespace(_q_scale_float=1.0, _k_scale_float=1.0)
        by_head = self.output.view(-1, heads, dims.v_head_dim).transpose(0, 1)

        def attend() -> torch.Tensor:
            q_nope, q_pe = self.q.split(parts, dim=-1)
            absorbed = self.q.new_empty(queries, heads, LATENT)
            torch.bmm(q_nope.transpose(0, 1), self.w_uk_t, out=absorbed.transpose(0, 1))
            latent_out, _ = impl.forward_mqa(
                (absorbed, q_pe), self.cache, metadata, scales
            )
            latent_out = latent_out.view(-1, heads, LATENT).transpose(0, 1)
            torch.bmm(latent_out, self.w_uv, out=by_head)
            return self.output

        return attend

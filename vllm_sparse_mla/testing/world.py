# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A sparse-MLA layer on steps made of vLLM's own metadata, without a model."""

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from vllm_sparse_mla.testing import kv_cache, reference
from vllm_sparse_mla.testing.host_callbacks import attend_on_host
from vllm_sparse_mla.testing.stand_ins import MaskedCall, noted_attention

CANARY = 0x5A5A5A5A
PADDING = 64  # canary words on each side of a mask workspace


@dataclass(frozen=True)
class Dims:
    """Dimensions of one layer; the smallest here, for the host."""

    num_heads: int = 2
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 24
    index_topk: int = 24
    kv_cache_dtype: str = "auto"

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def layer_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's sparse-MLA layers, but for the K/V projection."""
        return dict(
            num_heads=self.num_heads,
            head_size=self.latent_dim,
            scale=self.qk_head_dim**-0.5,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype=self.kv_cache_dtype,
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            qk_head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
        )


def causal_topk(length: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Rows as an indexer emits them: keys up to the query by score, then -1."""
    shape, device = (length, max(length, topk)), generator.device
    scores = torch.rand(shape, generator=generator, device=device)
    keys = torch.arange(shape[1], device=device)
    scores[keys > keys[:length, None]] = -1.0
    best = scores.topk(topk, dim=-1)
    return best.indices.where(best.values >= 0, -1).int()


# FA4 has kernels for the dimensions of real models only.
GPU_DIMS = Dims(
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


@dataclass(frozen=True)
class Step:
    """One scheduler step: metadata, and the tokens of its prefill requests."""

    spans: tuple[tuple[int, int, int], ...]
    metadata: Any
    q: torch.Tensor
    latents: torch.Tensor
    topk: torch.Tensor
    guarded_mask: torch.Tensor

    def write_topk(self, buffer: torch.Tensor) -> None:
        """Put the rows behind those of the decodes, which all ask for key 0."""
        first = self.metadata.num_decode_tokens
        buffer.zero_()
        buffer[first : first + len(self.topk)] = self.topk

    def poison_mask(self) -> None:
        self.guarded_mask[PADDING:-PADDING] = -1

    def assert_canaries(self) -> None:
        zones = (self.guarded_mask[:PADDING], self.guarded_mask[-PADDING:])
        assert (torch.cat(zones) == CANARY).all(), "written beside the mask workspace"


class Projection:
    """A linear layer as vLLM's: it returns the product, and no bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class World:
    """Prompts with all that attention reads of them, and one layer.

    Without a GPU, the reference stands in for FA4, the paged gathers and the LSE merge;
    the packed callbacks themselves run, on the host. `calls` notes what the layer asks
    of FA4. `rows` are the prompts' tokens as the cache holds them, written by vLLM
    where there is a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        prompt_lens: Sequence[int],
        dims: Dims | None = None,
        block_size: int = 16,
        seed: int = 0,
        max_tokens: int = 4096,
        k_scale: float = 1.0,
    ) -> None:
        self.device, self.block_size = device, block_size
        self.calls: list[MaskedCall] = []
        self.dims = dims or (GPU_DIMS if device.type == "cuda" else Dims())
        self.generator = torch.Generator(device).manual_seed(seed)
        d = self.dims
        self.weight = self.randn(
            d.num_heads * (d.qk_nope_head_dim + d.v_head_dim), d.kv_lora_rank
        ).mul_(d.kv_lora_rank**-0.5)
        self.latents = [self.randn(n, d.latent_dim) for n in prompt_lens]
        self.q = [self.randn(n, d.num_heads, d.qk_head_dim) for n in prompt_lens]
        self.draw_topk()
        width = max(-(-n // block_size) for n in prompt_lens)
        order = torch.randperm(
            len(prompt_lens) * width, generator=self.generator, device=device
        )
        self.block_table = order.int().view(len(prompt_lens), width)
        self.k_scale = torch.full((1,), k_scale, device=device)
        self.rows = [self.encode(latents) for latents in self.latents]
        self.cache = self.rows[0].new_empty(
            len(prompt_lens) * width, block_size, self.rows[0].shape[1]
        )
        self.topk_buffer = torch.zeros(
            max_tokens, d.index_topk, dtype=torch.int32, device=device
        )
        self.impl = self.make_impl(topk_indices_buffer=self.topk_buffer)

    def draw_topk(self) -> None:
        """Give the prompts new top-k rows."""
        self.topk = [
            causal_topk(len(q), self.dims.index_topk, self.generator) for q in self.q
        ]

    def randn(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return values.to(torch.bfloat16)

    def make_impl(self, cls: type | None = None, **kwargs: Any) -> Any:
        """Make a layer that is to take the masked path whatever the device."""
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.attention.sparse_mla_attention import (
            SparseMLACommonImpl,
        )

        cls = cls or SparseMLACommonImpl
        # No distributed set-up: the layer asks for nothing but the size.
        one_rank = {"get_tensor_model_parallel_world_size": lambda: 1}
        config = VllmConfig(device_config=DeviceConfig(device=self.device.type))
        with contextlib.ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(config))
            for base in cls.__mro__:
                names = getattr(vars(base).get("__init__"), "__globals__", {})
                if one_rank.keys() & names.keys():
                    stack.enter_context(mock.patch.dict(names, one_rank))
            impl = cls(
                **self.dims.layer_arguments(),
                kv_b_proj=Projection(self.weight),
                **kwargs,
            )
        impl.masked_mha_available = True
        impl._sparse_mla_force_masked_mha = True
        return impl

    def whole_mask_words(
        self, spans: Sequence[tuple[int, int, int]], fits: bool = True
    ) -> int:
        """Words of a workspace that the mask over whole sequences fits, or just not.

        Stock, which these tests also run on, reserves a word of each row.
        """
        from vllm.model_executor.layers.attention import sparse_mla_attention

        longest = max(stop - start for _, start, stop in spans)
        reserve = fits and any(start > 0 for _, start, _ in spans)
        shape = sparse_mla_attention._topk_mask_shape(
            len(spans), longest, max(stop for *_, stop in spans), reserve
        )
        return math.prod(shape) - (not fits)

    def mask_workspace(self, words: int) -> torch.Tensor:
        """Canary words around a workspace full of ones."""
        guarded = torch.full((words + 2 * PADDING,), CANARY, dtype=torch.int32)
        guarded[PADDING:-PADDING] = -1
        return guarded.to(self.device)

    def step(
        self,
        spans: Sequence[tuple[int, int, int]],
        *,
        decodes: int = 0,
        chunk_rows: int = 4096,
        mask_words: int | None = None,
        guarded_mask: torch.Tensor | None = None,
        metadata_cls: type | None = None,
    ) -> Step:
        """Plan a step as vLLM's metadata builder does.

        Args:
            spans: ``(prompt, start, stop)`` of each prefill request.
            decodes: decode requests of one token in front of them.
            chunk_rows: tokens of the context workspace.
            mask_words: size of the mask workspace; None fits the whole mask.
            guarded_mask: a mask workspace to use instead of a new one.
            metadata_cls: class of the metadata; None is the base class.
        """
        from vllm.model_executor.layers.attention import sparse_mla_attention as layer
        from vllm.model_executor.layers.attention.mla_attention import (
            build_mla_chunked_context_metadata,
        )

        prompts, starts, stops = zip(*spans)
        lens = [stop - start for start, stop in zip(starts, stops)]
        ends = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
        query_start_loc, table = ends.to(self.device), self.block_table[list(prompts)]
        if guarded_mask is None:
            words = self.whole_mask_words(spans) if mask_words is None else mask_words
            guarded_mask = self.mask_workspace(words)
        context = build_mla_chunked_context_metadata(
            context_lens_cpu=torch.tensor(starts, dtype=torch.int32),
            prefill_query_start_loc_cpu=ends,
            chunked_prefill_workspace=self.weight.new_full(
                (chunk_rows, self.dims.latent_dim), math.nan
            ),
            chunked_prefill_workspace_size=chunk_rows,
            block_size=self.block_size,
            align_chunk_to_block=True,
            device=self.device,
            dcp_world_size=1,
            dcp_local_block_size=1,
            dcp_virtual_block_size=1,
        )
        prefill = layer.SparseMLAPrefillMetadata(
            block_table=table,
            query_start_loc=query_start_loc,
            max_query_len=max(lens),
            query_lens_cpu=ends.diff(),
            chunked_context=context,
            topk_mask_workspace=guarded_mask[PADDING:-PADDING],
        )
        rows = torch.repeat_interleave(torch.tensor(lens)).int() + decodes
        rows = torch.cat((torch.arange(decodes, dtype=torch.int32), rows))
        metadata = (metadata_cls or layer.SparseMLACommonMetadata)(
            num_reqs=decodes + len(spans),
            max_query_len=max(lens),
            max_seq_len=max(stops),
            num_actual_tokens=len(rows),
            query_start_loc=torch.cat((rows[:decodes], ends + decodes)).to(self.device),
            slot_mapping=torch.empty(0),
            block_table=torch.cat((table[:1].expand(decodes, -1), table)),
            req_id_per_token=rows.to(self.device),
            block_size=self.block_size,
            topk_tokens=self.dims.index_topk,
            num_decodes=decodes,
            num_prefills=len(spans),
            num_decode_tokens=decodes,
            prefill_max_seq_len=max(stops),
            prefill=prefill,
        )

        def pick(per_prompt: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([per_prompt[p][start:stop] for p, start, stop in spans])

        return Step(
            tuple(spans),
            metadata,
            pick(self.q),
            pick(self.latents),
            pick(self.topk),
            guarded_mask,
        )

    def encode(self, latents: torch.Tensor) -> torch.Tensor:
        """Rows of the cache for `latents`: `[tokens, entry]`."""
        dtype = self.dims.kv_cache_dtype
        size = kv_cache.row_bytes(dtype, self.dims.latent_dim)
        if size is None or self.device.type != "cuda":
            return kv_cache.write_latents(latents, dtype, self.k_scale)
        from vllm import _custom_ops

        rows = latents.new_empty((1, len(latents), size), dtype=torch.uint8)
        rank = self.dims.kv_lora_rank
        slots = torch.arange(len(latents), device=self.device)
        _custom_ops.concat_and_cache_mla(
            latents[:, :rank], latents[:, rank:], rows, slots, dtype, self.k_scale
        )
        return rows[0]

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Float64 latents of cache rows, by the definition of their format."""
        return kv_cache.read_latents(rows, self.dims.kv_cache_dtype, self.k_scale)

    def write_cache(self, step: Step, with_new_tokens: bool = False) -> None:
        """Store the contexts, NaN of every format wherever there is none."""
        self.cache.view(torch.uint8).fill_(0xFF)
        rows = self.cache.flatten(0, 1)
        for prompt, start, stop in step.spans:
            tokens = torch.arange(stop if with_new_tokens else start)
            tokens = tokens.to(self.device)
            block = self.block_table[prompt][tokens // self.block_size].long()
            slots = block * self.block_size + tokens % self.block_size
            rows[slots] = self.rows[prompt][: len(tokens)]

    def run(self, step: Step, impl: Any = None, write_topk: bool = True):
        """One layer step into an output full of NaN.

        Returns:
            ``[tokens, heads, v_head_dim]``.
        """
        impl = impl or self.impl
        self.write_cache(step)
        if write_topk:
            step.write_topk(impl.topk_indices_buffer)
        if step.metadata.prefill.chunked_context is not None:
            step.metadata.prefill.chunked_context.workspace.fill_(math.nan)
        output = self.new_output(step)
        self.forward(step, impl, output)
        step.assert_canaries()
        return output.unflatten(-1, (self.dims.num_heads, self.dims.v_head_dim))

    def device_calls(self) -> contextlib.AbstractContextManager[None]:
        """What a layer calls, replaced where there is no GPU; attention is noted."""
        on_gpu = self.device.type == "cuda"
        attend = None if on_gpu else attend_on_host
        return noted_attention(self.calls, attend, cache_ops=on_gpu)

    def new_output(self, step: Step) -> torch.Tensor:
        shape = (len(step.q), self.dims.num_heads * self.dims.v_head_dim)
        return step.q.new_full(shape, math.nan)

    def forward(self, step: Step, impl: Any, output: torch.Tensor) -> None:
        """The layer's call and nothing else."""
        rank, cache = self.dims.kv_lora_rank, self.cache
        if self.dims.kv_cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
            # As vLLM hands it to the layer, whichever of the formats it holds.
            cache = cache.view(torch.float8_e4m3fn)
        with self.device_calls():
            impl.forward_mha(
                step.q,
                step.latents[:, :rank],
                step.latents[:, rank:].unsqueeze(1),
                cache,
                step.metadata,
                self.k_scale,
                output,
            )

    def project(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of whole sequences, in the precision of `latents`."""
        d = self.dims
        kv = latents[:, : d.kv_lora_rank] @ self.weight.to(latents.dtype).t()
        k_nope, v = kv.unflatten(-1, (d.num_heads, -1)).split(
            (d.qk_nope_head_dim, d.v_head_dim), dim=-1
        )
        k_pe = latents[:, None, d.kv_lora_rank :].expand(-1, d.num_heads, -1)
        return torch.cat((k_nope, k_pe), dim=-1), v

    def attended(self, step: Step) -> torch.Tensor:
        """Float64 latents of the step's sequences, one after another.

        Contexts are what the cache holds. New tokens are as they come, also where the
        cache will hold them quantized: so attends vLLM's dense MHA too.
        """
        return torch.cat(
            [
                part
                for p, start, stop in step.spans
                for part in (
                    self.decode(self.rows[p][:start]),
                    self.latents[p][start:stop].double(),
                )
            ]
        )

    def oracle(self, step: Step, latents: torch.Tensor) -> torch.Tensor:
        """Attention over `latents` of the step's sequences, in their precision.

        Keys after their query are dropped.
        """
        _, starts, stops = zip(*step.spans)
        return reference.gathered_topk_attention(
            step.q,
            *self.project(latents),
            step.metadata.prefill.query_start_loc,
            torch.tensor([0, *itertools.accumulate(stops)]),
            step.topk,
            softmax_scale=self.impl.scale,
            query_offsets=torch.tensor(starts),
            dtype=latents.dtype,
        )[0]

    def expected(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The float64 oracle's output, and each row's error budget."""
        latents = self.attended(step)
        exact = self.oracle(step, latents)
        eager = self.oracle(step, latents.to(torch.bfloat16))
        return exact, reference.attention_error_budget(exact, eager)

    def assert_right(self, step: Step, output: torch.Tensor) -> None:
        exact, budget = self.expected(step)
        error = reference.attention_error(output, exact)
        over = (error > budget).nonzero().flatten().tolist()
        assert not over, (
            f"{len(over)} of {len(error)} rows exceed their budget, first {over[:4]}: "
            f"errors {error[over[:4]].tolist()}, budgets {budget[over[:4]].tolist()}"
        )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A sparse-MLA layer on steps made of vLLM's own metadata, without a model."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_sparse_mla.testing import kv_cache, reference
from vllm_sparse_mla.testing.host_callbacks import attend_on_host
from vllm_sparse_mla.testing.layer import DEEPSEEK, Dims, make_layer, project
from vllm_sparse_mla.testing.masks import GuardedMask, causal_topk
from vllm_sparse_mla.testing.stand_ins import MaskedCall, noted_attention

# FA4 has kernels for the dimensions of real models only.
GPU_DIMS = replace(DEEPSEEK, num_heads=16, index_topk=24)


def plan_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_table: torch.Tensor,
    *,
    block_size: int,
    topk: int,
    context_workspace: torch.Tensor,
    mask_workspace: torch.Tensor,
    decodes: int = 0,
    cls: type | None = None,
) -> Any:
    """Metadata of a step, as vLLM's builder plans it.

    Lengths are those of the prefill requests, whose contexts the cache holds; decode
    requests of one token go in front of them.

    Args:
        query_lens: new tokens of each.
        context_lens: cached tokens of each.
        block_table: int32 `[requests, blocks]`, on the device that attends.
        block_size: tokens of a block.
        topk: keys that the indexer keeps for a query.
        context_workspace: `[tokens, latent_dim]`, gets the chunks of contexts.
        mask_workspace: int32 `[words]`, gets the masks.
        decodes: how many.
        cls: class of the metadata; None is the base class.
    """
    from vllm.model_executor.layers.attention import sparse_mla_attention as layer
    from vllm.model_executor.layers.attention.mla_attention import (
        build_mla_chunked_context_metadata,
    )

    device = block_table.device
    seq_lens = [q + c for q, c in zip(query_lens, context_lens)]
    ends = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    prefill = layer.SparseMLAPrefillMetadata(
        block_table=block_table,
        query_start_loc=ends.to(device),
        max_query_len=max(query_lens),
        query_lens_cpu=ends.diff(),
        # None where no request has a context.
        chunked_context=build_mla_chunked_context_metadata(
            context_lens_cpu=torch.tensor(context_lens, dtype=torch.int32),
            prefill_query_start_loc_cpu=ends,
            chunked_prefill_workspace=context_workspace,
            chunked_prefill_workspace_size=len(context_workspace),
            block_size=block_size,
            align_chunk_to_block=True,
            device=device,
            dcp_world_size=1,
            dcp_local_block_size=1,
            dcp_virtual_block_size=1,
        ),
        topk_mask_workspace=mask_workspace,
    )
    lens = torch.tensor([1] * decodes + list(query_lens))
    starts = torch.cat((torch.arange(decodes, dtype=torch.int32), ends + decodes))
    return (cls or layer.SparseMLACommonMetadata)(
        num_reqs=len(lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_actual_tokens=int(starts[-1]),
        query_start_loc=starts.to(device),
        slot_mapping=torch.empty(0),
        block_table=torch.cat((block_table[:1].expand(decodes, -1), block_table)),
        req_id_per_token=torch.repeat_interleave(lens).int().to(device),
        block_size=block_size,
        topk_tokens=topk,
        num_decodes=decodes,
        num_prefills=len(query_lens),
        num_decode_tokens=decodes,
        prefill_max_seq_len=max(seq_lens),
        prefill=prefill,
    )


def encode_latents(
    dims: Dims, latents: torch.Tensor, k_scale: torch.Tensor
) -> torch.Tensor:
    """Rows of a layer's cache for latents: `[tokens, entry]`; by vLLM on a GPU."""
    dtype = dims.kv_cache_dtype
    size = kv_cache.row_bytes(dtype, dims.latent_dim)
    if size is None or not latents.is_cuda:
        return kv_cache.write_latents(latents, dtype, k_scale)
    from vllm import _custom_ops

    rows = latents.new_empty((1, len(latents), size), dtype=torch.uint8)
    rank = dims.kv_lora_rank
    slots = torch.arange(len(latents), device=latents.device)
    _custom_ops.concat_and_cache_mla(
        latents[:, :rank], latents[:, rank:], rows, slots, dtype, k_scale
    )
    return rows[0]


@dataclass(frozen=True)
class Step:
    """One scheduler step: metadata, and the tokens of its prefill requests."""

    spans: tuple[tuple[int, int, int], ...]  # ``(prompt, start, stop)`` of each request
    metadata: Any  # what the layer gets
    q: torch.Tensor  # `[tokens, num_heads, qk_head_dim]`
    latents: torch.Tensor  # `[tokens, latent_dim]`
    topk: torch.Tensor  # int32 `[tokens, index_topk]`
    mask: GuardedMask  # the mask workspace

    def write_topk(self, buffer: torch.Tensor) -> None:
        """Put the rows behind those of the decodes, which all ask for key 0."""
        first = self.metadata.num_decode_tokens
        buffer.zero_()
        buffer[first : first + len(self.topk)] = self.topk


@dataclass(frozen=True)
class Judgement:
    """How far an output is from the oracle's, and may be; float64 `[tokens]` each."""

    error: torch.Tensor
    budget: torch.Tensor

    @property
    def ratio(self) -> torch.Tensor:
        """Error over budget; 0 where both are 0."""
        return (self.error / self.budget).nan_to_num(nan=0.0, posinf=math.inf)

    def assert_right(self) -> None:
        """Fails if a row exceeds its budget."""
        over = (self.ratio > 1).nonzero().flatten().tolist()
        assert not over, (
            f"{len(over)} of {len(self.error)} rows exceed their budget, first "
            f"{over[:4]}: errors {self.error[over[:4]].tolist()}, "
            f"budgets {self.budget[over[:4]].tolist()}"
        )


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
        max_tokens: int = 4096,
        k_scale: float = 1.0,
        num_blocks: int | None = None,
        attend: Callable[..., Any] | None = None,
        config: Any = None,
    ) -> None:
        """Draws the prompts and makes the layer, the smallest that the device can run.

        Args:
            device: where everything lies.
            prompt_lens: tokens of each prompt.
            dims: of another layer.
            block_size: tokens of a block of the cache.
            max_tokens: rows of the indexer's buffer.
            k_scale: of a cache in a flat FP8 format.
            num_blocks: of the cache; None holds each prompt once.
            attend: stands in for FA4; None is FA4 itself on a GPU, and elsewhere
                `attend_on_host`.
            config: vLLM's configuration, see `make_layer`.
        """
        self.device, self.block_size = device, block_size
        self.calls: list[MaskedCall] = []
        self.config = config
        on_gpu = device.type == "cuda"
        self.attend = attend or (None if on_gpu else attend_on_host)
        self.dims = dims or (GPU_DIMS if on_gpu else Dims())
        self.generator = torch.Generator(device).manual_seed(0)
        d = self.dims
        self.weight = self.randn(d.num_heads * d.kv_b_dim, d.kv_lora_rank)
        self.weight.mul_(d.kv_lora_rank**-0.5)
        self.latents = [self.randn(n, d.latent_dim) for n in prompt_lens]
        self.q = [self.randn(n, d.num_heads, d.qk_head_dim) for n in prompt_lens]
        self.draw_topk()
        width = max(-(-n // block_size) for n in prompt_lens)
        own_blocks = len(prompt_lens) * width
        order = torch.randperm(own_blocks, generator=self.generator, device=device)
        self.block_table = order.int().view(len(prompt_lens), width)
        self.k_scale = torch.full((1,), k_scale, device=device)
        self.rows = [encode_latents(d, x, self.k_scale) for x in self.latents]
        self.cache = self.rows[0].new_empty(
            num_blocks or own_blocks, block_size, self.rows[0].shape[1]
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
        """Make a layer of a class; None is the one that all sparse-MLA layers share."""
        from vllm.model_executor.layers.attention.sparse_mla_attention import (
            SparseMLACommonImpl,
        )

        cls = cls or SparseMLACommonImpl
        return make_layer(cls, self.dims, self.weight, self.config, **kwargs)

    def whole_mask_words(
        self, spans: Sequence[tuple[int, int, int]], per_range: bool = False
    ) -> int:
        """Words of a workspace that the mask over whole sequences fits, or just not.

        In the latter a layer builds a mask for each range of a step with context.

        Stock, which these tests also run on, reserves a word of each row.
        """
        from vllm.model_executor.layers.attention import sparse_mla_attention

        longest = max(stop - start for _, start, stop in spans)
        reserve = not per_range and any(start > 0 for _, start, _ in spans)
        shape = sparse_mla_attention._topk_mask_shape(
            len(spans), longest, max(stop for *_, stop in spans), reserve
        )
        return math.prod(shape) - per_range

    def step(
        self,
        spans: Sequence[tuple[int, int, int]],
        *,
        decodes: int = 0,
        chunk_rows: int = 4096,
        mask_words: int | None = None,
        per_range: bool = False,
        mask: GuardedMask | None = None,
        metadata_cls: type | None = None,
    ) -> Step:
        """Plan a step as vLLM's metadata builder does.

        A span is a prefill request, ``(prompt, start, stop)``; decode requests of one
        token go in front of them. ``chunk_rows`` are tokens of the context workspace,
        ``mask_words`` those of a new mask workspace: None fits the whole mask, or just
        not if ``per_range``.
        """
        prompts, starts, stops = zip(*spans)
        if mask is None:
            if mask_words is None:
                mask_words = self.whole_mask_words(spans, per_range)
            mask = GuardedMask(mask_words, self.device)
        metadata = plan_step(
            [stop - start for start, stop in zip(starts, stops)],
            starts,
            self.block_table[list(prompts)],
            block_size=self.block_size,
            topk=self.dims.index_topk,
            context_workspace=self.weight.new_empty(chunk_rows, self.dims.latent_dim),
            mask_workspace=mask.words,
            decodes=decodes,
            cls=metadata_cls,
        )
        return self.take(spans, metadata, mask)

    def take(
        self,
        spans: Sequence[tuple[int, int, int]],
        metadata: Any,
        mask: GuardedMask,
    ) -> Step:
        """A step by metadata that is there, for all its requests, and a workspace."""
        prefill = replace(metadata.prefill, topk_mask_workspace=mask.words)

        def pick(per_prompt: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([per_prompt[p][start:stop] for p, start, stop in spans])

        return Step(
            tuple(spans),
            replace(metadata, prefill=prefill),
            pick(self.q),
            pick(self.latents),
            pick(self.topk),
            mask,
        )

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Float64 latents of cache rows, by the definition of their format."""
        return kv_cache.read_latents(rows, self.dims.kv_cache_dtype, self.k_scale)

    def write_cache(self, step: Step) -> None:
        """Store the sequences, as vLLM does before it attends.

        NaN of every format is wherever there is none.
        """
        self.cache.view(torch.uint8).fill_(0xFF)
        rows = self.cache.flatten(0, 1)
        tables = step.metadata.prefill.block_table
        for (prompt, _, stop), table in zip(step.spans, tables):
            tokens = torch.arange(stop, device=self.device)
            block = table[tokens // self.block_size].long()
            slots = block * self.block_size + tokens % self.block_size
            rows[slots] = self.rows[prompt][:stop]

    def run(self, step: Step, impl: Any = None, write_topk: bool = True):
        """One layer step into an output of NaN: ``[tokens, heads, v_head_dim]``."""
        impl = impl or self.impl
        self.write_cache(step)
        if write_topk:
            step.write_topk(impl.topk_indices_buffer)
        if step.metadata.prefill.chunked_context is not None:
            step.metadata.prefill.chunked_context.workspace.fill_(math.nan)
        output = self.new_output(step)
        self.forward(step, impl, output)
        step.mask.assert_canaries()
        return output.unflatten(-1, (self.dims.num_heads, self.dims.v_head_dim))

    def device_calls(self) -> contextlib.AbstractContextManager[None]:
        """What a layer calls, replaced where there is no GPU; attention is noted."""
        on_gpu = self.device.type == "cuda"
        return noted_attention(self.calls, self.attend, cache_ops=on_gpu)

    def takes_one_pass(self, step: Step) -> bool:
        """Whether contexts are attended to together with new tokens; stock's never."""
        takes = getattr(self.impl, "_takes_one_pass", lambda _: False)
        return takes(step.metadata.prefill)

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
        """Attention over `latents` of the step's sequences, in their precision."""
        return self.gathered(step, step.q, *project(self.dims, self.weight, latents))

    def gathered(
        self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention to the keys of the step's top-k rows, in the precision of `k`.

        Keys after their query are dropped.
        """
        _, starts, stops = zip(*step.spans)
        return reference.gathered_topk_attention(
            q,
            k,
            v,
            step.metadata.prefill.query_start_loc,
            torch.tensor([0, *itertools.accumulate(stops)]),
            step.topk,
            softmax_scale=self.impl.scale,
            query_offsets=torch.tensor(starts),
            dtype=k.dtype,
        )[0]

    def expected(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The float64 oracle's output, and each row's error budget."""
        latents = self.attended(step)
        exact = self.oracle(step, latents)
        eager = self.oracle(step, latents.to(torch.bfloat16))
        return exact, reference.attention_error_budget(exact, eager)

    def judge(self, step: Step, output: torch.Tensor) -> Judgement:
        """Compare a run's output with the oracle's."""
        exact, budget = self.expected(step)
        return Judgement(reference.attention_error(output, exact), budget)

    def assert_right(self, step: Step, output: torch.Tensor) -> None:
        """Fails if a row of the output exceeds its budget."""
        self.judge(step, output).assert_right()

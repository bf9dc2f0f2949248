# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each step's prefill through the overlaid layer, judged by the gathered-top-k oracle.

The oracle starts from the same latents, projection weights and top-k rows, works in
float64 and never sees a mask, a chunk or a cache. The error budget of a query is twice
what an eager BF16 run of the same attention errs by, plus rounding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import sparse_mla_attention as layer_module
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
)
from vllm_sparse_mla.testing import reference
from vllm_sparse_mla.testing.mla_layer import make_masked_layer
from vllm_sparse_mla.testing.stand_ins import MaskedCall, noted_attention
from vllm_sparse_mla.testing.steps import EngineStep, ScheduledRun

NO_CONTEXT = "no context"
WHOLE_SEQUENCE = "whole sequence"
PER_RANGE = "per range"
# The callbacks that the layer hands to FA4 on each path.
_CALLBACKS = {
    NO_CONTEXT: {"dense_mask_mod"},
    WHOLE_SEQUENCE: {"offset_dense_mask_mod"},
    PER_RANGE: {"dense_mask_mod"},
}


@dataclass(frozen=True)
class StepResult:
    """What one step's prefill gave on one mask path.

    Attributes:
        step: number of the engine step.
        context_lens: of each prefill request.
        query_lens: of each prefill request.
        mask_path: the path that was asked for.
        attention_calls: calls of FA4 or its stand-in.
        largest_error: largest absolute error of the output.
        budget: error budget of the query that has it.
        error_over_budget: largest ratio of any query's error to its own budget.
        problem: what else is wrong; empty if nothing.
    """

    step: int
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    mask_path: str
    attention_calls: int
    largest_error: float
    budget: float
    error_over_budget: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.error_over_budget <= 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok} | vars(self)


def causal_topk_rows(
    positions: torch.Tensor, topk: int, generator: torch.Generator
) -> torch.Tensor:
    """Top-k rows as an indexer emits them: by score, only keys up to the query.

    Args:
        positions: int `[T]`, each query's position in its sequence.
        topk: keys to keep.
        generator: of the scores.

    Returns:
        int32 `[T, topk]`; rows of early queries end in -1.
    """
    num_keys = int(positions.max()) + 1 if len(positions) else 0
    scores = torch.rand(len(positions), max(num_keys, topk), generator=generator)
    scores[torch.arange(scores.shape[1]) > positions[:, None]] = -1.0
    best = scores.topk(topk, dim=-1)
    return best.indices.where(best.values >= 0, -1).int()


class PrefillCheck:
    """One attention layer with random weights and the cache that it reads.

    Attributes:
        run: the schedule whose steps the layer gets.
        impl: the overlaid layer.
        cache: the paged latent cache.
    """

    def __init__(self, run: ScheduledRun, fa4: bool, seed: int = 0) -> None:
        """Sets up the layer.

        Args:
            run: the schedule whose steps the layer will get.
            fa4: attention runs on the real FA4, else on the reference.
            seed: of weights, latents, queries and top-k rows.
        """
        self.run = run
        self._fa4 = fa4
        self._generator = torch.Generator().manual_seed(seed)
        w = run.workload
        self._weight = self._randn(
            w.num_heads * (w.qk_nope_head_dim + w.v_head_dim), w.kv_lora_rank
        ).mul_(w.kv_lora_rank**-0.5)
        self._latents = [
            self._randn(prompt_len + w.output_len, w.latent_dim)
            for prompt_len in w.prompt_lens
        ]
        # NaN wherever no token was written: reading there shows in the output.
        self.cache = torch.full(
            (w.num_blocks, w.block_size, w.latent_dim),
            math.nan,
            dtype=torch.bfloat16,
            device=run.device,
        )
        self._topk = torch.full(
            (w.token_budget, w.index_topk), -1, dtype=torch.int32, device=run.device
        )
        with set_current_vllm_config(run.vllm_config):
            self.impl = make_masked_layer(
                SparseMLACommonImpl,
                num_heads=w.num_heads,
                kv_lora_rank=w.kv_lora_rank,
                qk_nope_head_dim=w.qk_nope_head_dim,
                qk_rope_head_dim=w.qk_rope_head_dim,
                v_head_dim=w.v_head_dim,
                kv_b_weight=self._weight,
                topk_indices_buffer=self._topk,
            )

    def _randn(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator)
        return values.to(torch.bfloat16).to(self.run.device)

    def results(self) -> Iterator[StepResult]:
        """Run every step that has a prefill, on each mask path that it can take."""
        for step in self.run.steps():
            self._write_cache(step)
            if step.metadata.prefill is not None:
                yield from self._judge(step)

    def _write_cache(self, step: EngineStep) -> None:
        """Store the step's tokens, as vLLM does before a layer attends."""
        rows = [
            self._latents[request][context : context + query]
            for request, context, query in zip(
                step.requests, step.context_lens, step.query_lens
            )
        ]
        slots = step.metadata.slot_mapping
        self.cache.flatten(0, 1)[slots] = torch.cat(rows)

    def _judge(self, step: EngineStep) -> Iterator[StepResult]:
        prefills = step.prefills
        contexts = step.context_lens[prefills]
        queries = step.query_lens[prefills]
        w = self.run.workload
        positions = torch.cat(
            [torch.arange(c, c + n) for c, n in zip(contexts, queries)]
        )
        topk = causal_topk_rows(positions, w.index_topk, self._generator)
        topk = topk.to(self.run.device)
        first = step.metadata.num_decode_tokens
        self._topk.fill_(0)  # decodes' rows are not for the prefill
        self._topk[first : first + len(positions)] = topk
        q = self._randn(len(positions), w.num_heads, w.qk_head_dim)

        # The layer runs first: memory that the oracle freed cannot hold the answer.
        runs = [(path, *self._forward(step, q, path)) for path in self._paths(step)]
        expected, budget = self._oracle(step, q, topk)
        for path, output, calls in runs:
            error = reference.attention_error(output, expected)
            worst = int(error.argmax())
            ratio = (error / budget).nan_to_num(nan=0.0, posinf=math.inf)
            problem = ""
            if not calls or set(calls) != _CALLBACKS[path]:
                problem = f"attention was called with {calls}"
            elif not budget.isfinite().all():
                problem = "the eager run that sets the budget is not finite"
            yield StepResult(
                step=step.index,
                context_lens=tuple(contexts),
                query_lens=tuple(queries),
                mask_path=path,
                attention_calls=len(calls),
                largest_error=float(error[worst]),
                budget=float(budget[worst]),
                error_over_budget=float(ratio.max()),
                problem=problem,
            )

    def _workspace(self, step: EngineStep, path: str) -> torch.Tensor:
        """A mask workspace of just the size that leads to a path, full of ones."""
        prefill = step.metadata.prefill
        shape = layer_module._topk_mask_shape(
            len(prefill.query_lens_cpu),
            prefill.max_query_len,
            step.metadata.prefill_max_seq_len,
        )
        numel = math.prod(shape) - (1 if path == PER_RANGE else 0)
        return torch.full((numel,), -1, dtype=torch.int32, device=self.run.device)

    def _paths(self, step: EngineStep) -> list[str]:
        prefill = step.metadata.prefill
        if prefill.chunked_context is None:
            return [NO_CONTEXT]
        smaller = replace(prefill, topk_mask_workspace=self._workspace(step, PER_RANGE))
        # Short contexts may need no more words whole than in ranges.
        reachable = self.impl.masked_mha_workspace_fits(smaller)
        return [WHOLE_SEQUENCE, PER_RANGE] if reachable else [WHOLE_SEQUENCE]

    def _forward(
        self, step: EngineStep, q: torch.Tensor, path: str
    ) -> tuple[torch.Tensor, list[str]]:
        w = self.run.workload
        prefills = step.prefills
        new = torch.cat(
            [
                self._latents[request][context : context + query]
                for request, context, query in zip(
                    step.requests[prefills],
                    step.context_lens[prefills],
                    step.query_lens[prefills],
                )
            ]
        )
        prefill = replace(
            step.metadata.prefill, topk_mask_workspace=self._workspace(step, path)
        )
        if prefill.chunked_context is not None:
            prefill.chunked_context.workspace.fill_(math.nan)
        output = new.new_full((len(new), w.num_heads * w.v_head_dim), math.nan)
        calls: list[MaskedCall] = []
        attend = None if self._fa4 else reference.flash_attn_varlen_func
        on_gpu = self.run.device.type == "cuda"
        with (
            set_current_vllm_config(self.run.vllm_config),
            noted_attention(calls, attend, cache_ops=on_gpu),
        ):
            self.impl.forward_mha(
                q,
                new[:, : w.kv_lora_rank],
                new[:, w.kv_lora_rank :].unsqueeze(1),
                self.cache,
                replace(step.metadata, prefill=prefill),
                torch.ones(1, device=self.run.device),
                output,
            )
        return output.unflatten(-1, (w.num_heads, w.v_head_dim)), [
            call.callback for call in calls
        ]

    def _project(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of whole sequences, in the precision of `latents`."""
        w = self.run.workload
        weight = self._weight.to(latents.dtype)
        kv = latents[:, : w.kv_lora_rank] @ weight.t()
        kv = kv.unflatten(-1, (w.num_heads, -1))
        k_nope, v = kv.split((w.qk_nope_head_dim, w.v_head_dim), dim=-1)
        k_pe = latents[:, None, w.kv_lora_rank :].expand(-1, w.num_heads, -1)
        return torch.cat((k_nope, k_pe), dim=-1), v

    def _oracle(
        self, step: EngineStep, q: torch.Tensor, topk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prefills = step.prefills
        contexts = step.context_lens[prefills]
        queries = step.query_lens[prefills]
        seq_lens = [c + n for c, n in zip(contexts, queries)]
        latents = torch.cat(
            [
                self._latents[request][:seq_len]
                for request, seq_len in zip(step.requests[prefills], seq_lens)
            ]
        )
        attend = [
            reference.gathered_topk_attention(
                q,
                *self._project(latents.to(dtype)),
                torch.tensor([0, *queries]).cumsum(0),
                torch.tensor([0, *seq_lens]).cumsum(0),
                topk,
                softmax_scale=self.impl.scale,
                query_offsets=torch.tensor(contexts),
                dtype=dtype,
            )[0]
            for dtype in (torch.float64, torch.bfloat16)
        ]
        return attend[0], reference.attention_error_budget(*attend)

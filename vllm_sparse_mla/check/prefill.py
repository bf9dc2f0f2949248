# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each step's prefill through the overlaid layer, judged by the gathered-top-k oracle.

The oracle starts from the same latents, projection weights and top-k rows, works in
float64 and never sees a mask, a chunk or a cache. The error budget of a query is twice
what an eager BF16 run of the same attention errs by, plus rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_sparse_mla.testing import reference
from vllm_sparse_mla.testing.masks import GuardedMask
from vllm_sparse_mla.testing.steps import EngineStep, ScheduledRun
from vllm_sparse_mla.testing.world import Step, World

NO_CONTEXT = "no context"
ONE_PASS = "one pass"
WHOLE_SEQUENCE = "whole sequence"
PER_RANGE = "per range"
# The callbacks that the layer hands to FA4 on each path.
_CALLBACKS = {
    NO_CONTEXT: {"dense_mask_mod"},
    ONE_PASS: {"dense_mask_mod"},
    WHOLE_SEQUENCE: {"offset_dense_mask_mod"},
    PER_RANGE: {"dense_mask_mod"},
}


@dataclass(frozen=True)
class StepResult:
    """What one step's prefill gave on one mask path."""

    step: int  # number of the engine step
    context_lens: tuple[int, ...]  # of each prefill request
    query_lens: tuple[int, ...]  # of each prefill request
    mask_path: str  # the path that was asked for
    attention_calls: int  # calls of FA4 or its stand-in
    largest_error: float  # largest absolute error of the output
    budget: float  # error budget of the query that has it
    error_over_budget: float  # largest ratio of any query's error to its own budget
    problem: str = ""  # what else is wrong; empty if nothing

    @property
    def ok(self) -> bool:
        return not self.problem and self.error_over_budget <= 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok} | vars(self)


def check_prefills(run: ScheduledRun, fa4: bool) -> Iterator[StepResult]:
    """Run every step that has a prefill, on each mask path that it can take.

    Args:
        run: the schedule, whose steps one layer with random weights gets.
        fa4: whether the layer runs on the real FA4, else on the reference.
    """
    w = run.workload
    # A GPU whose FA4 takes no packed masks.
    on_gpu = run.device.type == "cuda"
    instead = reference.flash_attn_varlen_func if on_gpu and not fa4 else None
    world = World(
        run.device,
        [prompt_len + w.output_len for prompt_len in w.prompt_lens],
        w.dims,
        w.block_size,
        max_tokens=w.token_budget,
        num_blocks=w.num_blocks,
        attend=instead,
        config=run.vllm_config,
    )
    for step in run.steps():
        if step.metadata.prefill is not None:
            yield from _check_step(world, step)


def _check_step(world: World, engine_step: EngineStep) -> Iterator[StepResult]:
    # The layer runs first: memory that the oracle freed cannot hold the answer.
    runs = []
    for path, step in _paths(world, engine_step).items():
        world.calls.clear()
        output = world.run(step)
        runs.append((path, step, output, [call.callback for call in world.calls]))
    prefills = engine_step.prefills
    for path, step, output, calls in runs:
        judgement = world.judge(step, output)
        worst = int(judgement.error.argmax())
        problem = ""
        if not calls or set(calls) != _CALLBACKS[path]:
            problem = f"attention was called with {calls}"
        elif not judgement.budget.isfinite().all():
            problem = "the eager run that sets the budget is not finite"
        yield StepResult(
            step=engine_step.index,
            context_lens=tuple(engine_step.context_lens[prefills]),
            query_lens=tuple(engine_step.query_lens[prefills]),
            mask_path=path,
            attention_calls=len(calls),
            largest_error=float(judgement.error[worst]),
            budget=float(judgement.budget[worst]),
            error_over_budget=float(judgement.ratio.max()),
            problem=problem,
        )


def _paths(world: World, engine_step: EngineStep) -> dict[str, Step]:
    """The step with a mask workspace of just the size that leads to each path."""
    spans, metadata = engine_step.spans, engine_step.metadata

    def with_workspace(per_range: bool = False) -> Step:
        words = world.whole_mask_words(spans, per_range)
        return world.take(spans, metadata, GuardedMask(words, world.device))

    if metadata.prefill.chunked_context is None:
        return {NO_CONTEXT: with_workspace()}
    whole = with_workspace()
    paths = {ONE_PASS if world.takes_one_pass(whole) else WHOLE_SEQUENCE: whole}
    smaller = with_workspace(per_range=True)
    # Short contexts may need no more words whole than in ranges.
    if world.impl.masked_mha_workspace_fits(smaller.metadata.prefill):
        paths[PER_RANGE] = smaller
    return paths

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is wrong with servers of one launch, stock first, and with their answers.

All of it at once, in sentences: a launch takes a GPU minutes.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from serving.compare import Difference, between, difference, spread, worst
from serving.scenario import Answers, control_difference, noise_budget
from serving.server import Server

# vLLM's own, compiled anew for some numbers of tokens or requests and not warmed up by
# it: when that is depends on how requests happen to be batched.
COMPILED_BY_BATCH = {"fused_moe_kernel", "BuildPrefillChunkMetadataKernel"}


def compiled_beyond_stock(
    servers: Mapping[str, Server], answers: Mapping[str, Answers], variant: str
) -> set[str]:
    """Kernels that ``variant`` compiled while serving, and stock did not."""

    def compiled(name: str) -> tuple[set[str], set[str]]:
        kernels = servers[name].jit_kernels()
        late = set(kernels[len(answers[name].warm_jit) :])
        return set(kernels), late - COMPILED_BY_BATCH

    pairs = zip(compiled(variant), compiled("stock"), strict=True)
    return set().union(*(found - stock for found, stock in pairs))


def _budget(stock: Answers) -> Difference:
    """Twice stock's own spread; its mean is of prompts that were scored as a whole."""
    by_prompt = stock.by_prompt()
    scored = [runs for runs in by_prompt if runs[0].prompt_logprobs]
    return replace(noise_budget(by_prompt), mean=noise_budget(scored).mean)


def judge_answers(answers: Mapping[str, Answers]) -> list[str]:
    """Compare by stock's own spread; other keys would have to be noticed."""
    failed = [
        f"{variant}: {completion.error or completion.status}"
        for variant, found in answers.items()
        for completion in found.everything()
        if not completion.ok
    ]
    if failed:
        return failed
    stock = answers["stock"]
    budget = _budget(stock)
    # A mean over few tokens is no tighter than its largest part.
    few = Difference(budget.largest, budget.largest)
    complaints = []
    for variant, found in answers.items():
        seen = control_difference(found.alone[-1][0], found.control)
        if not (seen.mean > 2 * budget.mean and seen.largest > budget.largest):
            complaints.append(f"{variant}: other keys go unnoticed, {seen} in {budget}")
        if variant == "stock":
            continue
        prompts = zip(stock.by_prompt(), found.by_prompt(), strict=True)
        for index, (own, other) in enumerate(prompts):
            away = between(own, other)
            bound = budget if own[0].prompt_logprobs else few
            if not away.within(bound):
                complaints.append(f"{variant}, prompt {index}: {away}, not {bound}")
        for index, (own, other) in enumerate(zip(stock.alone, found.alone)):
            same = variant == "opt-in" or not spread(own).identical
            if not (same or between(own, other).identical):
                complaints.append(f"{variant}, prompt {index}: stock repeats itself")
        for index, (own, other) in enumerate(
            zip(stock.prefixed, found.prefixed, strict=True)
        ):
            away = difference(own, other)
            if own.cached_tokens != other.cached_tokens or not away.within(few):
                complaints.append(f"{variant}, after prefix {index}: {away}")
    return complaints


def judge_masked_mha(calls: Mapping[str, list[dict]], masked: bool) -> list[str]:
    """Whether masked MHA ran where it should: under the opt-in alone, if there."""
    return [
        f"{variant}: {len(found)} calls of masked MHA"
        for variant, found in calls.items()
        if bool(found) is not (masked and variant == "opt-in")
    ]


def judge_logs(
    servers: Mapping[str, Server], answers: Mapping[str, Answers]
) -> list[str]:
    """A line a process says that it is active; no more is compiled than by stock."""
    complaints = []
    for variant, server in servers.items():
        processes = [server.process.pid, *(p.pid for p in server.engine_processes())]
        expected = [] if variant == "stock" else sorted(processes)
        if sorted(server.active_pids()) != expected:
            complaints.append(
                f"{variant}: active in {server.active_pids()}, not {expected}"
            )
        beyond = compiled_beyond_stock(servers, answers, variant)
        if beyond:
            complaints.append(f"{variant}: compiled while serving: {sorted(beyond)}")
    return complaints


def judge_acceptance(drafts: Mapping[str, tuple[int, int]]) -> list[str]:
    """Compare accepted drafts, given (drafted, accepted) tokens by variant.

    Three standard errors apart is as good as the same: answers may part by rounding.
    """
    drafted, accepted = drafts["stock"]
    if not 0 < accepted < drafted:
        return [f"stock: {accepted} of {drafted} drafts accepted, nothing to compare"]
    rate = accepted / drafted
    complaints = []
    for variant, (drafted_here, accepted_here) in drafts.items():
        away = accepted_here - rate * drafted_here
        variance = rate * (1 - rate) * drafted_here * (1 + drafted_here / drafted)
        if not drafted_here or abs(away) > 3 * math.sqrt(variance):
            complaints.append(
                f"{variant}: {accepted_here} of {drafted_here} drafts accepted, "
                f"stock {accepted} of {drafted}"
            )
    return complaints


def describe(
    servers: Mapping[str, Server],
    answers: Mapping[str, Answers],
    calls: Mapping[str, list[dict]],
) -> dict[str, Any]:
    """What was seen of each variant, and how far its answers are from stock's."""
    report: dict[str, Any] = {
        variant: {
            "masked MHA calls": len(calls[variant]),
            "compiled while serving": server.jit_kernels(),
        }
        for variant, server in servers.items()
    }
    if all(c.ok for found in answers.values() for c in found.everything()):
        stock = answers["stock"].by_prompt()
        report["budget"] = asdict(_budget(answers["stock"]))
        for variant, found in answers.items():
            pairs = zip(stock, found.by_prompt(), strict=True)
            report[variant] |= asdict(worst(between(*pair) for pair in pairs))
    return report

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The check's results as text and tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from vllm_sparse_mla.codegen.table import columns
from vllm_sparse_mla.tables import make_table

# These import vLLM, which the process has to be prepared for first.
if TYPE_CHECKING:
    from vllm_sparse_mla.check.codegen_report import CallbackResult
    from vllm_sparse_mla.check.environment import EnvironmentReport, OverlayState
    from vllm_sparse_mla.check.prefill import StepResult
    from vllm_sparse_mla.check.serving_report import LengthRange, ServingReport


def verdict(ok: bool, problem: str = "") -> str:
    """Say that something holds, or that it failed and why."""
    if ok:
        return "[green]ok[/green]"
    return "[red]FAILED[/red]" + (f": {problem}" if problem else "")


def _overlay_line(state: "OverlayState") -> str:
    if state.active:
        return f"active ({len(state.files)} files) {verdict(True)}"
    return verdict(False, state.error or f"not active, layer is {state.layer_file}")


def print_environment(console: Console, report: "EnvironmentReport") -> None:
    """Print versions, device and the state of the overlay."""
    versions = ", ".join(f"{name} {v}" for name, v in report.versions.items())
    console.print(f"Versions: {versions}", markup=False)
    console.print(f"Device: {report.device}", markup=False)
    console.print(f"Overlay here: {_overlay_line(report.overlay)}")
    console.print(
        f"Overlay in a new process: {_overlay_line(report.overlay_in_new_process)}"
    )


def print_steps(console: Console, title: str, results: "Sequence[StepResult]") -> None:
    """Print the comparison of each step's prefill with the oracle."""
    table = make_table(
        console,
        title,
        "step",
        "Contexts",
        "Query lengths",
        "Mask path",
        "largest error",
        "error budget",
        "error / budget",
        "Verdict",
    )
    for result in results:
        table.add_row(
            str(result.step),
            ", ".join(map(str, result.context_lens)),
            ", ".join(map(str, result.query_lens)),
            result.mask_path,
            f"{result.largest_error:.2e}",
            f"{result.budget:.2e}",
            f"{result.error_over_budget:.2f}",
            verdict(result.ok, result.problem),
        )
    console.print(table)


def print_callbacks(console: Console, results: "Sequence[CallbackResult]") -> None:
    """Print the mask's loads in each compiled kernel."""
    names = ("SASS", "applied", "mask loads", "LDL+STL")
    table = make_table(
        console,
        f"FA4 forward, 192/128, cross-compiled for {results[0].record.target}: loads "
        "that the mask adds",
        *("Callback", "Causal", *names, "Verdict"),
    )
    for result in results:
        variant, found = result.record.variant, columns(result.record)
        table.add_row(
            variant.callback_label,
            "yes" if variant.causal else "no",
            *(found[name] for name in names),
            verdict(result.ok, result.problem) if result.judged else "to compare",
        )
    console.print(table)


def _ranges(ranges: "Sequence[LengthRange]") -> str:
    parts = []
    for r in ranges:
        pieces = f", pieces of {r.min_query_len} or more" if r.min_query_len else ""
        parts.append(f"{r.first} to {r.last}{pieces}")
    return "\n".join(parts) or "none"


def print_serving(console: Console, report: "ServingReport") -> None:
    """Print whether masked MHA serves the model, and for which lengths."""
    launch = report.launch
    console.print(
        f"Model: {report.model}, {report.gpu}, tensor parallel size "
        f"{report.tensor_parallel_size}",
        markup=False,
    )
    if launch is not None:
        console.print(
            f"KV cache: {launch.kv_cache_dtype}, decided by {launch.decided_by}",
            markup=False,
        )
        console.print(f"Attention backend: {launch.backend}")
    if report.no_estimate:
        console.print(f"No estimate decides: {report.no_estimate}", markup=False)
    if not report.used:
        console.print("Masked MHA: will not be used")
        for reason in report.reasons:
            console.print(f"  {reason}", markup=False)
        return
    decides = "vLLM's table of lengths"
    if report.estimated_by:
        decides = f"estimate from measurements of {report.estimated_by}"
    console.print(
        f"Masked MHA: will be used, for sequences of these tokens, by {decides}",
        markup=False,
    )
    table = make_table(console, "", "Whole prompts", "With context")
    table.add_row(_ranges(report.whole_prompts), _ranges(report.with_context))
    console.print(table)
    mib = report.workspace_bytes / 2**20
    sizes = report.workspace[0].longest_sequence
    table = make_table(
        console,
        f"Mask workspace of {mib:.0f} MiB: longest sequence whose whole mask fits, in "
        "tokens.\nA longer one has its mask built range by range if it has context, "
        "and is left to sparse MQA if not.",
        "longest query",
        *(f"{size} request{'s' * (size > 1)}" for size in sizes),
    )
    for row in report.workspace:
        table.add_row(str(row.query_len), *map(str, row.longest_sequence.values()))
    console.print(table)

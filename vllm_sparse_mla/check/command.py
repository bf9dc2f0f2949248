# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``vllm-sparse-mla check``."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from vllm_sparse_mla.tables import make_console

if TYPE_CHECKING:
    from vllm_sparse_mla.check.codegen_report import CallbackResult
    from vllm_sparse_mla.check.environment import EnvironmentReport
    from vllm_sparse_mla.check.prefill import StepResult
    from vllm_sparse_mla.testing.steps import Workload

# Tells what is being done; called with each piece of work.
_Progress = Callable[[str], None]


@dataclass(frozen=True)
class Schedule:
    """A workload and what its steps gave."""

    workload: "Workload"
    results: "list[StepResult]"

    @property
    def title(self) -> str:
        w, d = self.workload, self.workload.dims
        prompts = ", ".join(map(str, w.prompt_lens))
        piece = f", at most {w.longest_piece} of one prompt" if w.longest_piece else ""
        return (
            f"Prompts of {prompts} tokens, {w.token_budget} a step{piece}; "
            f"{d.num_heads} heads of {d.qk_head_dim}/{d.v_head_dim}, "
            f"top-k {d.index_topk}"
        )

    @property
    def unaligned_contexts(self) -> int:
        """Contexts that are no multiple of a mask word's 32 keys."""
        steps = {result.step: result.context_lens for result in self.results}
        return sum(context % 32 != 0 for lens in steps.values() for context in lens)

    @property
    def ok(self) -> bool:
        return bool(self.results) and all(result.ok for result in self.results)


@dataclass(frozen=True)
class Report:
    """Everything that the check found; sections that were skipped are None."""

    environment: "EnvironmentReport"
    attention: str
    stand_ins: list[str]
    schedules: list[Schedule]
    callbacks: "list[CallbackResult] | None"
    codegen_error: str = ""

    @property
    def ok(self) -> bool:
        return (
            self.environment.ok
            and all(schedule.ok for schedule in self.schedules)
            and not self.codegen_error
            and all(result.ok for result in self.callbacks or ())
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "environment": self.environment.to_dict(),
            "attention": self.attention,
            "stand_ins": self.stand_ins,
            "schedules": [
                {
                    "ok": schedule.ok,
                    "workload": asdict(schedule.workload),
                    "unaligned_contexts": schedule.unaligned_contexts,
                    "steps": [result.to_dict() for result in schedule.results],
                }
                for schedule in self.schedules
            ],
            "codegen": {
                "skipped": self.callbacks is None and not self.codegen_error,
                "error": self.codegen_error,
                "callbacks": [result.to_dict() for result in self.callbacks or ()],
            },
        }


def _workloads(
    prompts: tuple[int, ...] | None, budget: int, heads: int, topk: int
) -> "list[Workload]":
    from vllm_sparse_mla.testing.steps import DIMS, Workload

    dims = replace(DIMS, num_heads=heads, index_topk=topk)
    common: dict[str, Any] = {"token_budget": budget, "dims": dims}
    if prompts is not None:
        longest = max(prompts, default=0)
        return [Workload(prompts, **common, max_model_len=max(4096, longest + 64))]
    return [
        Workload((300, 800, 517), **common),
        # Several prompts with context in one step.
        Workload((300, 650, 517), **common, longest_piece=230),
    ]


def _prepare(
    progress: _Progress, capability: tuple[int, int] | None = None
) -> "tuple[EnvironmentReport, bool]":
    """Make this process ready; returns the report on it and whether it has a GPU."""
    from vllm_sparse_mla.check import environment

    progress("importing vLLM, here and in a new process")
    with ThreadPoolExecutor() as pool:
        new_process = pool.submit(environment.new_process_overlay_state)
        has_gpu = environment.prepare_process(capability)
        report = environment.EnvironmentReport(
            environment.package_versions(),
            environment.device_description(),
            environment.overlay_state(),
            new_process.result(),
        )
        return report, has_gpu


def _run(
    prompts: tuple[int, ...] | None,
    budget: int,
    heads: int | None,
    topk: int,
    skip_codegen: bool,
    progress: _Progress,
) -> Report:
    env, has_gpu = _prepare(progress)
    from vllm_sparse_mla.check import environment

    fa4 = environment.uses_fa4()
    stand_ins = [] if fa4 else ["FA4 call"]
    if not has_gpu:
        stand_ins += ["paged-cache gather", "LSE merge"]

    from vllm_sparse_mla.check.prefill import check_prefills
    from vllm_sparse_mla.testing.steps import ScheduledRun

    schedules = []
    device = "cuda" if has_gpu else "cpu"
    for workload in _workloads(prompts, budget, heads or (16 if has_gpu else 2), topk):
        schedule = Schedule(workload, [])
        schedules.append(schedule)
        progress(schedule.title)
        for result in check_prefills(ScheduledRun(workload, device), fa4):
            schedule.results.append(result)
            progress(f"step {result.step}, {result.mask_path}")

    callbacks, codegen_error = None, ""
    if not skip_codegen:
        from vllm_sparse_mla.check.codegen_report import compile_callbacks
        from vllm_sparse_mla.codegen import CodegenError, DisassemblerMissing

        progress("cross-compiling FA4 for SM100")
        try:
            callbacks = compile_callbacks(
                lambda record: progress(f"compiled {record.variant.label}")
            )
        except (CodegenError, DisassemblerMissing) as error:
            codegen_error = str(error)
    attention = "FA4" if fa4 else "reference (plain PyTorch)"
    if not has_gpu:
        attention += ", FA4's callbacks on the host"
    return Report(env, attention, stand_ins, schedules, callbacks, codegen_error)


def _capability(gpu: str | None) -> tuple[int, int]:
    """Compute capability of the GPU that is asked about, or of the one that is here."""
    if gpu is not None:
        version = int(gpu.removeprefix("sm_"))
        return version // 10, version % 10
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter(
            "there is no NVIDIA GPU here: name the one that will serve, such as "
            "--gpu sm_100"
        )
    return torch.cuda.get_device_capability()


@contextmanager
def _progress() -> Iterator[_Progress]:
    """A spinner on a terminal; nothing in a pipe."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield status.update


def _print(console: Console, report: Report) -> None:
    from vllm_sparse_mla.check import render

    render.print_environment(console, report.environment)
    console.print(f"Attention: {report.attention}", markup=False)
    if report.stand_ins:
        console.print(f"Stood in for by the reference: {', '.join(report.stand_ins)}")
    for schedule in report.schedules:
        console.print()
        render.print_steps(console, schedule.title, schedule.results)
        console.print(
            f"Contexts that are no multiple of 32: {schedule.unaligned_contexts}"
        )
    console.print()
    if report.callbacks:
        render.print_callbacks(console, report.callbacks)
    elif report.codegen_error:
        console.print(f"Code generation: {render.verdict(False)}")
        console.print(report.codegen_error, markup=False)
    else:
        console.print("Code generation: skipped")
    console.print(f"Result: {render.verdict(report.ok)}")


def _parse_prompts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"must be token counts such as 300,800,517, got {text!r}",
            param_hint="--prompts",
        )
    return tuple(map(int, parts))


def _answer_for_model(
    model: Path, gpu: str | None, tp: int, kv_cache_dtype: str, as_json: bool
) -> NoReturn:
    from vllm_sparse_mla.check import render

    capability = _capability(gpu)
    try:
        with _progress() as progress:
            env, _ = _prepare(progress, capability)
            serving = None
            # Stock vLLM has not what decides.
            if env.overlay.active:
                from vllm_sparse_mla.check.serving_report import report_serving

                progress("asking vLLM")
                serving = report_serving(str(model), tp, kv_cache_dtype, capability)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        report = {
            "environment": env.to_dict(),
            "serving": serving and serving.to_dict(),
        }
        typer.echo(json.dumps({"ok": env.ok} | report))
    else:
        console = make_console()
        render.print_environment(console, env)
        if serving is not None:
            render.print_serving(console, serving)
    raise typer.Exit(0 if env.ok else 1)


def command(
    prompts: Annotated[
        str | None,
        typer.Option(help="Prompt lengths in tokens, such as 300,800,517."),
    ] = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Tokens that an engine step may hold.")
    ] = 512,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="Query heads; by default 2 on a CPU, 16 on a GPU."),
    ] = None,
    topk: Annotated[
        int, typer.Option(min=1, help="Keys that the indexer keeps for a query.")
    ] = 128,
    skip_codegen: Annotated[
        bool, typer.Option("--skip-codegen", help="Compile nothing.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Folder or config.json of a model: instead of the check, say whether "
            "masked MHA will serve it and for which prompts.",
        ),
    ] = None,
    gpu: Annotated[
        Literal["sm_90", "sm_100", "sm_103", "sm_120"] | None,
        typer.Option(help="GPU to serve --model with; by default the one here."),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor parallel size of --model; by default 1."),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="KV cache dtype of --model, as for vLLM; by default auto."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Check that the patch set is active, computes the right attention and compiles.

    Prompts go through vLLM's own scheduler and metadata builder, each step's prefill
    through the overlaid layer, and the output is compared with an oracle that gathers
    the top-k keys and never sees a mask. Ends with code 0 only if everything holds.
    """
    parsed = _parse_prompts(prompts)
    if model is not None:
        _answer_for_model(model, gpu, tp or 1, kv_cache_dtype or "auto", as_json)
    if (gpu, tp, kv_cache_dtype) != (None, None, None):
        raise typer.BadParameter("--gpu, --tp and --kv-cache-dtype need --model")
    with _progress() as progress:
        report = _run(parsed, budget, heads, topk, skip_codegen, progress)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _print(make_console(), report)
    raise typer.Exit(0 if report.ok else 1)

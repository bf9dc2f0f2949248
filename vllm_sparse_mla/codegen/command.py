# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``vllm-sparse-mla codegen``."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_mla.codegen.compiler import CodegenError, compile_variants
from vllm_sparse_mla.codegen.disassembly import DisassemblerMissing
from vllm_sparse_mla.codegen.latest_fa4 import check_latest_fa4
from vllm_sparse_mla.codegen.records import CodegenRecord
from vllm_sparse_mla.codegen.table import show_records
from vllm_sparse_mla.codegen.variants import (
    CALLBACKS,
    SM90_CALLBACKS,
    Variant,
    check_arch,
    every_variant,
    runs_on_sm90,
    short_list,
)
from vllm_sparse_mla.tables import make_console

_HELP_CALLBACK = (
    f"{', '.join(CALLBACKS)}, or FILE.py:FUNCTION; repeatable. Default: all that the "
    "target can run."
)


def command(
    arch: Annotated[list[str], typer.Option(help="Target; repeatable.")] = ("sm_100a",),
    callback: Annotated[list[str] | None, typer.Option(help=_HELP_CALLBACK)] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also without LSE and with two requests.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="The callbacks alone, without FA4.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Subprocesses at a time.")] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON Lines, a record a line.")
    ] = False,
    fa4_from_pypi: Annotated[
        bool,
        typer.Option(
            "--fa4-from-pypi",
            help="Compile with the newest FA4 on PyPI instead; reports, never fails.",
        ),
    ] = False,
) -> None:
    """Cross-compile FA4's masked kernels, with no GPU, and show facts of the code."""
    console, errors = make_console(), make_console(stderr=True)
    try:
        names = tuple(map(_resolve, callback)) if callback else None
        variants = [
            replace(variant, arch=target)
            for target in map(check_arch, arch)
            for variant in _choose(target, names, every, alone)
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    def show_progress(record: CodegenRecord) -> None:
        if errors.is_terminal:
            errors.print(f"{record.variant.label} {record.target}", style="dim")

    try:
        if fa4_from_pypi:
            records = check_latest_fa4(variants, arch[0], jobs, errors.print)
        else:
            records = compile_variants(variants, arch[0], jobs, show_progress)
    except (CodegenError, DisassemblerMissing) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(1) from error
    if as_json:
        for record in records:
            typer.echo(json.dumps(record.to_dict()))
    elif records:
        show_records(records, console)


def _resolve(callback: str) -> str:
    """Make the path of FILE.py:FUNCTION absolute: workers run elsewhere.

    Raises:
        ValueError: if there is no such file, or the file does not have that name.
    """
    file, colon, function = callback.rpartition(":")
    if not colon:
        return callback
    path = Path(file).absolute()
    if not path.is_file():
        raise ValueError(f"--callback: there is no file {file}")
    if not re.search(rf"\b{re.escape(function)}\b", path.read_text()) or not function:
        raise ValueError(f"--callback: {file} has no function {function!r}")
    return f"{path}:{function}"


def _choose(
    target: str, names: tuple[str, ...] | None, every: bool, alone: bool
) -> list[Variant]:
    """The variants to compile for one target.

    Raises:
        ValueError: if the target's kernel cannot run one of ``names``.
    """
    if target.startswith("sm_90"):
        names = names or SM90_CALLBACKS
        refused = set(names) & set(CALLBACKS) - set(SM90_CALLBACKS)
        if refused and not alone:
            raise ValueError(
                f"FA4 for {target} runs {', '.join(SM90_CALLBACKS)} or "
                f"FILE.py:FUNCTION, got {', '.join(sorted(refused))}"
            )
    if alone:
        variants = [
            v for v in short_list(names) if (v.head_dim, v.causal) == (192, False)
        ]
        packed = [v for v in variants if v.callback != "word32_scalar"]
        return [replace(variant, alone=True) for variant in packed]
    chosen = every_variant(names) if every else short_list(names)
    return list(filter(runs_on_sm90, chosen)) if target.startswith("sm_90") else chosen

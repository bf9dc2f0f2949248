# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``vllm-sparse-mla export-patch``."""

from pathlib import Path
from typing import Annotated

import typer


def _check_folder(output: Path | None) -> Path | None:
    """Refuse a file that cannot be written before the work, not after."""
    if output is not None and not output.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent}")
    return output


def command(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            writable=True,
            callback=_check_folder,
            help="File to write; standard output if none.",
        ),
    ] = None,
    upstream: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder that holds vllm/, or flash_attn/ with --fa4; the installed "
            "vLLM's if none.",
        ),
    ] = None,
    fa4: Annotated[
        bool,
        typer.Option(
            "--fa4", help="Write the FlashAttention-4 patch, for flash-attention."
        ),
    ] = False,
    series: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            callback=_check_folder,
            help="Folder for numbered files for `git am`, in place of one patch.",
        ),
    ] = None,
) -> None:
    """Write the overlay as a unified diff that `git apply` takes.

    Each definition of the overlay stands in it where upstream's file has its namesake;
    new files and the tests are at upstream's paths. With --series, vLLM's is cut into
    patches that can be merged one by one; --upstream then names a clone, if test files
    of upstream's are to get their tests.
    """
    # Not at the top: what it takes to write patches is not needed to serve.
    from vllm_sparse_mla.export_patch.changes import (
        collect_vllm_sources,
        installed_vllm_root,
        suite_sources,
    )
    from vllm_sparse_mla.export_patch.diff import patch_text
    from vllm_sparse_mla.export_patch.fa4 import collect_fa4_changes, fa4_series
    from vllm_sparse_mla.export_patch.series import write_series
    from vllm_sparse_mla.export_patch.suite import collect_suite, tests_root
    from vllm_sparse_mla.export_patch.vllm_series import Prefixes, read_table

    tests = tests_root()
    if series is not None and output is not None:
        raise typer.BadParameter("--series writes a folder, and takes no --output")
    if series is not None and tests is None:
        raise typer.BadParameter("--series needs a checkout: its patches bring tests")
    try:
        root = upstream if upstream is not None else installed_vllm_root()
        # Another tree is refused before the tests are rewritten: that takes long.
        sources = [] if fa4 else collect_vllm_sources(root)
        suite = collect_suite(tests) if tests and not fa4 else None
        if suite is not None:
            sources += suite_sources(root, suite)
        if series is not None:
            patches = (
                fa4_series(root, tests)
                if fa4
                else Prefixes(read_table(), sources).patches()
            )
            for path in write_series(series, patches):
                typer.echo(path)
            return
        changes = (
            collect_fa4_changes(root, tests)
            if fa4
            else [source.change() for source in sources]
        )
    except (ValueError, OSError, SyntaxError) as error:
        raise typer.BadParameter(str(error)) from error
    text = patch_text(changes)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)
    warnings = [change.warning for change in changes if change.warning]
    if tests is None:
        warnings.append("no tests in the patch: they are in a checkout only")
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    for name in suite.left_out if suite else ():
        typer.echo(f"left out, being about the plugin: {name}", err=True)
    new = sum(change.before is None for change in changes)
    definitions = sum(len(change.definitions) for change in changes)
    typer.echo(
        f"{len(changes) - new} files changed ({definitions} definitions), {new} new",
        err=True,
    )

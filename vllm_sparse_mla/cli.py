# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The console script ``vllm-sparse-mla``.

The commands' modules import vLLM, torch and the like when a command runs: help is
quick, and a command whose requirements are missing leaves the others usable.
"""

from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_mla.check.command import command as check
from vllm_sparse_mla.codegen.command import command as codegen
from vllm_sparse_mla.export_patch.cli import command as export_patch

# Without markup an error is one line, whatever the terminal's width.
app = typer.Typer(
    name="vllm-sparse-mla",
    help="Sparse-MLA masked-MHA prefill for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("check")(check)
app.command("codegen")(codegen)
app.command("export-patch")(export_patch)


@app.command("tiny-model")
def tiny_model(
    spec: Annotated[str, typer.Argument(help="Its sizes, such as tiny-128h.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write it to.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
) -> None:
    """Write a model like DeepSeek-V3.2 or GLM-5 with random weights, without a hub."""
    from vllm_sparse_mla.testing.tiny_model import get_spec, write_model

    try:
        get_spec(spec)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SPEC") from None
    try:
        write_model(folder, spec, seed=seed)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="FOLDER") from None
    size = (folder / "model.safetensors").stat().st_size
    typer.echo(f"{folder}: {spec}, {size / 2**20:.0f} MiB")

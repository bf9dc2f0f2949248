# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The console script ``vllm-sparse-mla``.

A command's module is imported when the command runs: help is quick, and a command
whose requirements are missing leaves the others usable.
"""

import importlib

import typer

_COMMANDS = {
    "check": (
        "vllm_sparse_mla.check.command",
        "Run real scheduling through the overlaid layer and compare with an oracle.",
    ),
    "codegen": (
        "vllm_sparse_mla.codegen.command",
        "Cross-compile the masked kernels and inspect the code; needs no GPU.",
    ),
    "export-patch": (
        "vllm_sparse_mla.export_patch",
        "Write the overlay as a patch against upstream vLLM.",
    ),
}

app = typer.Typer(
    name="vllm-sparse-mla",
    help="Sparse-MLA masked-MHA prefill for vLLM.",
    no_args_is_help=True,
    add_completion=False,
)


def _add(name: str, module: str, summary: str) -> None:
    @app.command(
        name,
        help=summary,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            # --help belongs to the command itself.
            "help_option_names": [],
        },
    )
    def forward(context: typer.Context) -> None:
        command = typer.Typer(add_completion=False)
        command.command(name)(importlib.import_module(module).command)
        command(args=context.args, prog_name=context.command_path)


for _name, (_module, _summary) in _COMMANDS.items():
    _add(_name, _module, _summary)

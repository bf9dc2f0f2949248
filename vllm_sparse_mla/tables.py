# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tables of the commands, on a terminal and in a pipe."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

# Wide enough for every table; a pipe has no width of its own.
_PIPE_WIDTH = 200


def make_console(stderr: bool = False) -> Console:
    """A console that colours and redraws on a terminal only."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)


def make_table(console: Console, title: str | None, *columns: str) -> Table:
    """A table without rows; columns whose names are capitalised hold text."""
    style = box.SIMPLE_HEAD if console.is_terminal else box.ASCII
    table = Table(title=title, title_justify="left", box=style)
    for name in columns:
        is_text = name[:2].istitle()  # "Variant", not "SASS"
        table.add_column(
            name.lower() if is_text else name, justify="left" if is_text else "right"
        )
    return table

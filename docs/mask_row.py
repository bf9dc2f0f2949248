# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw a row of a top-k mask, and which of its words an offset call reads.

python3 docs/mask_row.py        # writes docs/mask_row.svg
"""

import random
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

WORD_BITS, GROUP_WORDS, CALL_KEYS = 32, 4, 128
KEY_START = 77
WORDS = 12
SET, CLEAR, GROUP, CALL = "#4c72b0", "#dfe4ee", "#c44e52", "#55a868"


def draw(path: Path) -> None:
    """Write the picture, the same bytes each time."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "vllm-sparse-mla"
        matplotlib.rcParams["svg.fonttype"] = "none"
        make_figure().savefig(path, bbox_inches="tight", metadata={"Date": None})


def make_figure() -> Figure:
    """Words and bits of the row, the two groups, and the keys of the call."""
    figure = Figure(figsize=(12, 2.6))
    axes = figure.subplots()
    kept = sorted(random.Random(0).sample(range(WORDS * WORD_BITS), 150))
    axes.add_patch(Rectangle((0, 0), WORDS * WORD_BITS, 1, facecolor=CLEAR))
    axes.broken_barh([(key, 1) for key in kept], (0, 1), facecolor=SET, linewidth=0)
    for word in range(WORDS):
        place = (word * WORD_BITS, 0)
        axes.add_patch(Rectangle(place, WORD_BITS, 1, fill=False, edgecolor="black"))
        middle = (word + 0.5) * WORD_BITS
        axes.text(middle, 1.15, f"word {word}", ha="center", fontsize=8)
        first = f"keys {word * WORD_BITS} to {(word + 1) * WORD_BITS - 1}"
        axes.text(middle, -0.4, first, ha="center", fontsize=6)
    group_keys = GROUP_WORDS * WORD_BITS
    first_group = KEY_START // group_keys
    for number, group in enumerate((first_group, first_group + 1)):
        place = (group * group_keys, -0.05)
        axes.add_patch(
            Rectangle(place, group_keys, 1.1, fill=False, edgecolor=GROUP, linewidth=3)
        )
        text = f"16-byte load {number + 1}"
        axes.text((group + 0.5) * group_keys, 1.7, text, ha="center", color=GROUP)
    place = (KEY_START, -0.9)
    axes.add_patch(Rectangle(place, CALL_KEYS, 0.3, facecolor=CALL, linewidth=0))
    text = (
        f"columns 0 to {CALL_KEYS - 1} of the call: keys {KEY_START} to "
        f"{KEY_START + CALL_KEYS - 1}, from bit {KEY_START % WORD_BITS} of word "
        f"{KEY_START // WORD_BITS}"
    )
    axes.text(KEY_START + CALL_KEYS / 2, -1.4, text, ha="center", color=CALL)
    axes.set(xlim=(-2, WORDS * WORD_BITS + 2), ylim=(-1.6, 2.1))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))

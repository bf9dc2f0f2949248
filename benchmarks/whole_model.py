# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What DeepSeek-V3.2 would gain, estimated from a profile of some of its layers.

A tensor-parallel rank's time for a prompt of n tokens, on the GPU:

    layers / profiled layers * A + B + 2 n P / (F u) + 2 layers * W / (N e)

A is what the profile has of a layer beside matrix products, B what a request has once.
The rest is the same for every variant: P parameters that a token meets on a rank, at
the FP8 peak F and a utilisation u; two all-reduces a layer, which move W bytes through
a GPU at the rate N of NVLink and an efficiency e. u and e are assumed, low and high.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_groups import GROUPS, OTHER
from result_tables import markdown

from vllm_sparse_mla.testing.tiny_model import (
    INDEX_HEAD_DIM,
    INDEX_N_HEADS,
    KV_LORA_RANK,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    SPECS,
    V_HEAD_DIM,
)

PROFILED = "dsv32-16h"  # one rank of eight
RANKS = 8
DIMS = SPECS["dsv32-128h"]  # hidden size, heads and query rank are DeepSeek-V3.2's
LAYERS, DENSE_LAYERS = 61, 3
DENSE_WIDTH, EXPERT_WIDTH = 18432, 2048
EXPERTS, ACTIVE_EXPERTS = 256, 8 + 1  # routed; for a token, with the shared one
FP8_FLOPS = 1979e12
NVLINK_BYTES = 450e9  # a second, each way
BF16_BYTES = 2
VARIANTS = ("stock", "opt-in")


@dataclass(frozen=True)
class Assumed:
    """What is neither measured nor published, as fractions."""

    utilisation: float  # of the FP8 peak, by matrix products
    link: float  # of NVLink's rate, by an all-reduce


LOW, HIGH = Assumed(0.4, 0.5), Assumed(0.6, 0.8)


def parameters() -> tuple[int, int]:
    """Parameters of all layers that a token meets: split over ranks, and on each."""
    hidden, heads, rank = DIMS.hidden_size, DIMS.num_attention_heads, DIMS.q_lora_rank
    split = heads * (
        rank * (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM)
        + KV_LORA_RANK * (QK_NOPE_HEAD_DIM + V_HEAD_DIM)
        + V_HEAD_DIM * hidden
    )
    whole = hidden * (rank + KV_LORA_RANK + QK_ROPE_HEAD_DIM)
    whole += rank * INDEX_N_HEADS * INDEX_HEAD_DIM
    whole += hidden * (INDEX_HEAD_DIM + INDEX_N_HEADS)
    experts = LAYERS - DENSE_LAYERS
    width = DENSE_LAYERS * DENSE_WIDTH + experts * ACTIVE_EXPERTS * EXPERT_WIDTH
    return (
        LAYERS * split + 3 * hidden * width,
        LAYERS * whole + experts * hidden * EXPERTS,
    )


def products_ms(tokens: int, assumed: Assumed) -> float:
    """Milliseconds of a rank's matrix products."""
    split, whole = parameters()
    flops = 2 * tokens * (split / RANKS + whole)
    return 1e3 * flops / (FP8_FLOPS * assumed.utilisation)


def all_reduce_ms(tokens: int, assumed: Assumed) -> float:
    """Milliseconds of all all-reduces, each as a reduce-scatter and an all-gather."""
    size = BF16_BYTES * tokens * DIMS.hidden_size
    moved = 2 * (RANKS - 1) / RANKS * size
    return 1e3 * 2 * LAYERS * moved / (NVLINK_BYTES * assumed.link)


def measured_ms(rows: Sequence[dict]) -> dict[tuple[int, str], float]:
    """Scaled to all layers, by prompt tokens and variant, matrix products left out."""
    scale = LAYERS / SPECS[PROFILED].num_hidden_layers
    scales = dict.fromkeys(GROUPS, scale) | {"projections": 0.0, OTHER: 1.0}
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        if row["model"] == PROFILED and not row["kernel"] and row["group"] in scales:
            key = (int(row["prompt tokens"]), row["variant"])
            ms = scales[row["group"]] * float(row["median ms"])
            found[key] = found.get(key, 0.0) + ms
    return found


def whole_model(rows: Sequence[dict]) -> str:
    """The estimate by prompt tokens, from LOW to HIGH."""
    measured = measured_ms(rows)
    table = []
    for tokens in sorted({tokens for tokens, _ in measured}):
        shared = [
            (products_ms(tokens, assumed), all_reduce_ms(tokens, assumed))
            for assumed in (LOW, HIGH)
        ]
        line = {"prompt tokens": tokens}
        line |= {f"{v}: measured part": f"{measured[tokens, v]:.0f}" for v in VARIANTS}
        names = ("matrix products", "all-reduces")
        line |= {
            name: _range(both) for name, both in zip(names, zip(*shared), strict=True)
        }
        totals = {
            v: [measured[tokens, v] + sum(parts) for parts in shared] for v in VARIANTS
        }
        line |= {f"{v}: in all": _range(both) for v, both in totals.items()}
        low, high = (a / b for a, b in zip(*totals.values(), strict=True))
        line["times faster"] = f"{low:.2f} to {high:.2f}"
        table.append(line)
    return markdown(table)


def _range(both: Sequence[float]) -> str:
    return " to ".join(f"{ms:.0f}" for ms in both)


def assumptions() -> str:
    """Every number of the formula that the profile does not have, and its source."""
    split, whole = parameters()
    config, sheet = "DeepSeek-V3.2's config.json", "NVIDIA's data sheet of the H200"
    table = [
        ("layers, of them dense", f"{LAYERS}, {DENSE_LAYERS}", config),
        ("hidden size", f"{DIMS.hidden_size}", config),
        ("heads", f"{DIMS.num_attention_heads}", config),
        ("width of a dense layer, of an expert", f"{DENSE_WIDTH}, {EXPERT_WIDTH}",
         config),
        ("experts, of them for a token", f"{EXPERTS} + 1, {ACTIVE_EXPERTS}", config),
        ("parameters a token meets, split over ranks", f"{split / 1e9:.2f} billion",
         "the sizes above, and tiny_model.py's of attention"),
        ("parameters a token meets, on every rank", f"{whole / 1e9:.2f} billion",
         "down-projections, indexer, routers"),
        ("the same in all", f"{(split + whole) / 1e9:.2f} billion",
         "DeepSeek states 37 billion active parameters"),
        ("P, of a rank", f"{(split / RANKS + whole) / 1e9:.2f} billion",
         f"{RANKS} ranks"),
        ("F, FP8", f"{FP8_FLOPS / 1e12:.0f} TFLOP/s",
         f"{sheet}: half of what it states with sparsity"),
        ("N, NVLink each way", f"{NVLINK_BYTES / 1e9:.0f} GB/s",
         f"{sheet}: half of both ways"),
        ("W, through a GPU for n tokens",
         f"2 ({RANKS} - 1) / {RANKS} x {BF16_BYTES} n x {DIMS.hidden_size} bytes",
         "reduce-scatter and all-gather, BF16"),
        ("u, utilisation", f"{LOW.utilisation:.0%} to {HIGH.utilisation:.0%}",
         "assumed"),
        ("e, efficiency of an all-reduce", f"{LOW.link:.0%} to {HIGH.link:.0%}",
         "assumed"),
    ]  # fmt: skip
    names = ("", "value", "from")
    return markdown([dict(zip(names, line, strict=True)) for line in table])

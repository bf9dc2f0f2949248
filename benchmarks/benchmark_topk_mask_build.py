# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How long does it take to build the bit-packed top-k mask, and how near is the floor?

    python3 benchmarks/benchmark_topk_mask_build.py --csv build.csv --plot build.png

Variants: ``stock`` is the installed vLLM's function, ``triton`` and ``cutedsl`` are
this project's kernels, ``floor`` is a device copy that moves as many bytes as the mask
needs (the valid top-k rows read once, the mask written once). A shape is
``requests x queries in all x keys``; several requests are of unequal length. Rows hold
keys in order (``sorted``), in any order (``shuffled``), or in any order with -1 in the
second half (``half-empty``). Every mask is compared with a dense boolean grid before
anything is timed.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench_common import (
    activate_overlay,
    argument_parser,
    copy_floor,
    num_buffers,
    report_timings,
    require_gpu,
    time_interleaved,
    timing_rows,
    with_progress,
)
from mask_cases import SHARES, TOPK, cumulative, split_tokens

from vllm_sparse_mla.testing.masks import CANARY, expected_mask
from vllm_sparse_mla.testing.stock import load_stock_module

MODULE = "vllm.model_executor.layers.attention.sparse_mla_attention"
ROW_KINDS = ("sorted", "shuffled", "half-empty")
DEFAULT_SHAPES = (
    *(
        f"1x{queries}x{keys}"
        for queries in (1024, 4096, 8192)
        for keys in (2048, 8192, 32768, 131072)
    ),
    "8x4096x8192",
    "8x8192x32768",
)


@dataclass(frozen=True)
class Shape:
    """Requests, their queries in all, keys of each."""

    requests: int
    queries: int
    keys: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.queries}x{self.keys}"

    @property
    def q_lens(self) -> list[int]:
        """Query lengths of the requests."""
        return split_tokens(self.queries, self.requests)


def parse_shape(text: str) -> Shape:
    """Argument type of ``--shapes``."""
    shape = Shape(*map(int, text.split("x")))
    if shape.requests not in (1, len(SHARES)) or shape.queries % 1024:
        raise ValueError(
            f"a shape must have 1 or {len(SHARES)} requests and a multiple of 1024 "
            f"queries, got {text}"
        )
    return shape


def make_rows(rows: int, keys: int, kind: str, device) -> torch.Tensor:
    """Top-k rows of distinct keys, one from each of `TOPK` equal strata."""
    width = keys // TOPK
    index = torch.arange(TOPK, device=device) * width
    index = index + torch.randint(width, (rows, TOPK), device=device)
    if kind != "sorted":
        index = index.gather(1, torch.rand(rows, TOPK, device=device).argsort(1))
    if kind == "half-empty":
        index[:, TOPK // 2 :] = -1
    return index.int()


class Case:
    """Tensors of one shape and kind of rows, in as many copies as buffers rotate.

    Attributes:
        shape: of it.
        topk: int32 `[queries, topk]`, one for each buffer.
        per_request: the same, request by request.
        outs: the masks, likewise.
        cu_q_lens: int32 `[requests + 1]`.
        context_lens: int32 `[requests]`; every key may come before the queries, so that
            none is dropped.
        num_bytes: of a mask and its rows.
    """

    def __init__(self, shape: Shape, kind: str, device) -> None:
        self.shape = shape
        q_lens = shape.q_lens
        out_shape = load_stock_module(MODULE)._topk_mask_shape(
            shape.requests, max(q_lens), shape.keys
        )
        first = make_rows(sum(q_lens), shape.keys, kind, device)
        words = shape.requests * max(q_lens) * out_shape[2]
        self.num_bytes = 4 * (first.numel() + words)
        buffers = num_buffers(self.num_bytes)
        self.topk = [first, *(first.clone() for _ in range(buffers - 1))]
        self.per_request = [list(rows.split(q_lens)) for rows in self.topk]
        self.outs = [
            torch.full(out_shape, CANARY, dtype=torch.int32, device=device)
            for _ in range(buffers)
        ]
        self.cu_q_lens = cumulative(q_lens, device)
        self.context_lens = torch.full(
            (shape.requests,), shape.keys, dtype=torch.int32, device=device
        )


def make_variants(case: Case) -> dict[str, Callable[[int], object]]:
    """Functions that build the mask in buffer `i`, by name."""
    from vllm.model_executor.kernels.attention.dsa import topk_mask as ours

    q_lens = case.shape.q_lens
    sizes = max(q_lens), case.shape.keys

    def stock(i: int) -> object:
        return load_stock_module(MODULE)._build_topk_mask(
            case.per_request[i], q_lens, *sizes, case.outs[i]
        )

    def packed(build: Callable, i: int) -> object:
        return build(
            case.topk[i],
            case.cu_q_lens,
            *sizes,
            case.outs[i],
            context_lens=case.context_lens,
        )

    return {
        "stock": stock,
        "triton": functools.partial(packed, ours.build_topk_mask_triton),
        "cutedsl": functools.partial(packed, ours.build_packed_topk_mask),
    }


def measure(shape: Shape, kind: str, repeat: int, device) -> list[dict]:
    """Check, then time every variant of one case."""
    case = Case(shape, kind, device)
    variants = make_variants(case)
    out, longest = case.outs[0], max(shape.q_lens)
    sizes = (longest, shape.keys, out.shape[2])
    words = expected_mask(case.topk[0], shape.q_lens, *sizes)
    correct = {}
    for name, launch in variants.items():
        out.fill_(CANARY)
        launch(0)
        correct[name] = torch.equal(out[:, :longest], words)
        if not correct[name] and name != "stock":
            raise RuntimeError(f"{name} builds a wrong mask for {shape}, {kind} rows")
    buffers = len(case.outs)
    variants["floor"] = copy_floor(case.num_bytes, buffers)
    timings = time_interleaved(variants, buffers, repeat)
    named = {"shape": str(shape), "topk": TOPK, "rows": kind}
    rows = timing_rows(timings, case.num_bytes, buffers, named)
    return [row | {"correct": correct.get(row["variant"], "")} for row in rows]


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, parse_shape, DEFAULT_SHAPES)
    args = parser.parse_args()
    device = require_gpu()
    activate_overlay()
    torch.manual_seed(0)
    rows = []
    everything = itertools.product(args.shapes, ROW_KINDS)
    for shape, kind in with_progress(everything, "shapes"):
        rows += measure(shape, kind, args.repeat, device)
    report_timings("Building the top-k mask", rows, args)


if __name__ == "__main__":
    main()

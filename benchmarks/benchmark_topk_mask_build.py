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

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from bench_common import (
    activate_overlay,
    argument_parser,
    copy_floor,
    num_buffers,
    print_table,
    require_gpu,
    save_results,
    time_interleaved,
    timing_rows,
    with_progress,
)
from mask_cases import SHARES, cumulative, scattered_words, split_tokens

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
POISON = 0x5A5A5A5A
CHECK_ROWS = 256


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


def make_rows(rows: int, topk: int, keys: int, kind: str, device) -> torch.Tensor:
    """Top-k rows of distinct keys, one from each of `topk` equal strata."""
    width = keys // topk
    index = torch.arange(topk, device=device) * width
    index = index + torch.randint(width, (rows, topk), device=device)
    if kind != "sorted":
        index = index.gather(1, torch.rand(rows, topk, device=device).argsort(1))
    if kind == "half-empty":
        index[:, topk // 2 :] = -1
    return index.int()


@dataclass
class Case:
    """Tensors of one shape and kind of rows, in as many copies as buffers rotate."""

    shape: Shape
    topk: list[torch.Tensor]
    outs: list[torch.Tensor]
    cu_q_lens: torch.Tensor
    context_lens: torch.Tensor
    q_lens: list[int]
    num_bytes: int
    per_request: list[list[torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.per_request = [list(topk.split(self.q_lens)) for topk in self.topk]

    @property
    def max_q_len(self) -> int:
        """Longest request."""
        return max(self.q_lens)


def make_case(shape: Shape, kind: str, topk: int, mask_shape: Callable, device) -> Case:
    """Allocate a case; `mask_shape` is ``_topk_mask_shape``."""
    q_lens = shape.q_lens
    out_shape = mask_shape(shape.requests, max(q_lens), shape.keys)
    first = make_rows(sum(q_lens), topk, shape.keys, kind, device)
    words = shape.requests * max(q_lens) * out_shape[2]
    num_bytes = 4 * (first.numel() + words)
    buffers = num_buffers(num_bytes)
    return Case(
        shape=shape,
        topk=[first, *(first.clone() for _ in range(buffers - 1))],
        outs=[
            torch.full(out_shape, POISON, dtype=torch.int32, device=device)
            for _ in range(buffers)
        ],
        cu_q_lens=cumulative(q_lens, device),
        # Every key may come before the queries: none is dropped.
        context_lens=torch.full(
            (shape.requests,), shape.keys, dtype=torch.int32, device=device
        ),
        q_lens=q_lens,
        num_bytes=num_bytes,
    )


def is_correct(case: Case, out: torch.Tensor) -> bool:
    """Compare a mask with booleans that the indices were scattered into."""
    for request, rows in enumerate(case.per_request[0]):
        for first in range(0, case.max_q_len, CHECK_ROWS):
            words = out[request, first : min(first + CHECK_ROWS, case.max_q_len)]
            named = scattered_words(rows[first : first + CHECK_ROWS], out.shape[2])
            expected = torch.zeros_like(words)
            expected[: len(named)] = named
            if not torch.equal(expected, words):
                return False
    return True


def make_variants(case: Case) -> dict[str, Callable[[int], object]]:
    """Functions that build the mask in buffer `i`, by name."""
    from vllm.model_executor.kernels.attention.dsa import topk_mask as ours

    sizes = case.max_q_len, case.shape.keys

    def stock(i: int) -> object:
        return load_stock_module(MODULE)._build_topk_mask(
            case.per_request[i], case.q_lens, *sizes, case.outs[i]
        )

    def triton(i: int) -> object:
        return ours.build_topk_mask_triton(
            case.topk[i], case.cu_q_lens, *sizes, case.outs[i], case.context_lens
        )

    def front(i: int) -> object:
        return ours.build_packed_topk_mask(
            case.topk[i],
            case.cu_q_lens,
            *sizes,
            case.outs[i],
            context_lens=case.context_lens,
        )

    return {"stock": stock, "triton": triton, "cutedsl": front}


def measure(shape: Shape, kind: str, args, device) -> list[dict]:
    """Check, then time every variant of one case."""
    mask_shape = load_stock_module(MODULE)._topk_mask_shape
    case = make_case(shape, kind, args.topk, mask_shape, device)
    variants = make_variants(case)
    correct = {}
    for name, launch in variants.items():
        case.outs[0].fill_(POISON)
        launch(0)
        correct[name] = is_correct(case, case.outs[0])
        if not correct[name] and name != "stock":
            raise RuntimeError(f"{name} builds a wrong mask for {shape}, {kind} rows")
    buffers = len(case.outs)
    variants["floor"] = copy_floor(case.num_bytes, buffers)
    timings = time_interleaved(variants, buffers, args.repeat)
    named = {"shape": str(shape), "topk": args.topk, "rows": kind}
    rows = timing_rows(timings, case.num_bytes, buffers, named)
    return [row | {"correct": correct.get(row["variant"], "")} for row in rows]


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, parse_shape, DEFAULT_SHAPES)
    parser.add_argument("--rows", nargs="+", choices=ROW_KINDS, default=ROW_KINDS)
    parser.add_argument("--topk", type=int, default=2048)
    args = parser.parse_args()
    device = require_gpu()
    activate_overlay()
    torch.manual_seed(0)
    rows = []
    everything = itertools.product(args.shapes, args.rows)
    for shape, kind in with_progress(everything, "shapes"):
        rows += measure(shape, kind, args, device)
    shown = ("shape", "rows", "variant", "median us", "p10 us", "p90 us",
             "stock / this", "this / floor", "GB/s", "host us", "correct")  # fmt: skip
    print_table(
        f"Building the top-k mask, {torch.cuda.get_device_name()}",
        [{name: row[name] for name in shown} for row in rows],
    )
    save_results(args, rows)


if __name__ == "__main__":
    main()

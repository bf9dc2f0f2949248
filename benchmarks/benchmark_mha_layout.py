# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What does it take to lay out Q and K for MHA, and how near is that to the floor?

    python3 benchmarks/benchmark_mha_layout.py --csv layout.csv --plot layout.png

``query`` is RoPE, by vLLM's ``fused_q`` without an indexer, and the query that MHA gets
of it: ``stock`` rotates into a tensor of its own and copies the query, ``ours`` rotates
in place. ``K`` is what joins a head's own part, which the projection has put beside V,
with the RoPE part that heads share: ``stock`` copies twice, ``ours`` is this project's
kernel, ``flashinfer`` the one that stock takes for 128 heads where it is installed.
``floor`` is a device copy that moves as many bytes as have to be moved. A shape is
tokens x heads. All outputs are compared, bit for bit, before anything is timed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

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
from prefill_step import MODELS

from vllm_sparse_mla.testing.layer import Dims

TOKENS, HEADS = (4096, 8192, 16384), (16, 128)
DEFAULT_SHAPES = [f"{tokens}x{heads}" for heads in HEADS for tokens in TOKENS]
DTYPE = torch.bfloat16

Variants = dict[str, Callable[[int], torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """Tokens of a step, heads of a rank."""

    tokens: int
    heads: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads}"


def parse_shape(text: str) -> Shape:
    """Argument type of ``--shapes``."""
    shape = Shape(*map(int, text.split("x")))
    if shape.tokens < 1 or shape.heads < 1:
        raise ValueError(f"a shape must have a token and a head, got {text}")
    return shape


def query_variants(shape: Shape, dims: Dims, buffers: int) -> Variants:
    """Functions that rotate query number `i` and put it together, by name."""
    from vllm.models.deepseek_v32.common.kernels import fused_q
    from vllm.models.deepseek_v32.common.mha_query import mha_query

    parts = (dims.qk_nope_head_dim, dims.qk_rope_head_dim)
    queries = torch.randn(
        *(buffers, shape.tokens, shape.heads, sum(parts)), dtype=DTYPE, device="cuda"
    )
    angles = torch.rand(shape.tokens, parts[1] // 2, device="cuda")
    rotate = functools.partial(
        fused_q,
        torch.arange(shape.tokens, device="cuda"),
        q_pe_cos_sin_cache=torch.cat((angles.cos(), angles.sin()), dim=-1),
        index_q=None,
        index_q_cos_sin_cache=None,
        q_scale=torch.ones(1, device="cuda"),
        index_weights=None,
        index_weights_softmax_scale=0.0,
        index_weights_head_scale=0.0,
        has_indexer=False,
        quantize_mqa=False,
    )
    # Stands for the product that MQA gets, so that nothing is rotated in place.
    apart = torch.empty(shape.heads, shape.tokens, 8, dtype=DTYPE, device="cuda")

    def stock(i: int) -> torch.Tensor:
        q_nope, q_pe = queries[i].split(parts, dim=-1)
        *_, rotated = rotate(q_pe=q_pe, ql_nope=apart.transpose(0, 1))
        return torch.cat((q_nope, rotated), dim=-1)

    def ours(i: int) -> torch.Tensor:
        q_nope, q_pe = queries[i].split(parts, dim=-1)
        *_, rotated = rotate(q_pe=q_pe, ql_nope=q_nope)
        return mha_query(q_nope, rotated)

    return {"stock": stock, "ours": ours}


def k_variants(shape: Shape, dims: Dims, buffers: int) -> Variants:
    """Functions that make K number `i`, by name."""
    from vllm.model_executor.kernels.attention.dsa.concat_mla_k import concat_mla_k
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl
    from vllm.utils.flashinfer import has_flashinfer

    nope, rope = dims.qk_nope_head_dim, dims.qk_rope_head_dim
    joint = torch.randn(
        *(buffers, shape.tokens, shape.heads, dims.kv_b_dim), dtype=DTYPE, device="cuda"
    )
    k_nope = joint[..., :nope]
    k_pe = torch.randn(buffers, shape.tokens, 1, rope, dtype=DTYPE, device="cuda")

    def by_stock(flashinfer: bool, i: int) -> torch.Tensor:
        impl = SimpleNamespace(_use_flashinfer_concat_mla_k=flashinfer)
        return MLACommonBaseImpl._concat_k_nope_k_pe(impl, k_nope[i], k_pe[i])

    variants = {
        "stock": functools.partial(by_stock, False),
        "ours": lambda i: concat_mla_k(k_nope[i], k_pe[i]),
    }
    if has_flashinfer() and (shape.heads, nope, rope) == (128, 128, 64):
        variants["flashinfer"] = functools.partial(by_stock, True)
    return variants


PARTS = {"query": query_variants, "K": k_variants}


def bytes_moved(part: str, shape: Shape, dims: Dims) -> int:
    """Bytes that have to be read or written; of a query RoPE's own."""
    entries = 2 * shape.heads * dims.qk_rope_head_dim
    if part == "K":
        entries = dims.qk_rope_head_dim * (1 + shape.heads)
        entries += 2 * shape.heads * dims.qk_nope_head_dim
    return shape.tokens * entries * DTYPE.itemsize


def measure(part: str, model: str, shape: Shape, repeat: int) -> list[dict]:
    """Compare, then time every variant of one case."""
    dims = MODELS[model]
    num_bytes = bytes_moved(part, shape, dims)
    buffers = num_buffers(num_bytes)
    variants = PARTS[part](shape, dims, buffers)
    # Stock's first: ours rotates query number 0 where it lies.
    made = {name: launch(0).view(torch.int16) for name, launch in variants.items()}
    for name, found in made.items():
        if not torch.equal(found, made["stock"]):
            raise RuntimeError(f"{name} gives other bits of {part} than stock: {shape}")
    variants["floor"] = copy_floor(num_bytes, buffers)
    timings = time_interleaved(variants, buffers, repeat)
    case = {"part": part, "model": model, "shape": str(shape)}
    return timing_rows(timings, num_bytes, buffers, case)


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, parse_shape, DEFAULT_SHAPES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    require_gpu()
    activate_overlay(hopper=True)
    torch.manual_seed(0)
    cases = [
        (part, model, shape)
        for part in PARTS
        for model in args.models
        for shape in args.shapes
        if shape.heads <= MODELS[model].num_heads
    ]
    rows = []
    with torch.inference_mode():
        for case in with_progress(cases, "cases"):
            rows += measure(*case, args.repeat)
    report_timings("Laying out Q and K", rows, args)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What does one layer's prefill cost, masked MHA beside stock's sparse MQA?

    python3 benchmarks/benchmark_layer_step.py --csv layer.csv

For SM90, with the opt-in. ``masked`` is the layer's ``forward_mha``: K/V projection,
the mask, FA4, and with context the gather and the merges. ``reused`` is the same in a
layer that shares another's indexer result and so its mask. ``mqa`` is what stock vLLM
does there: absorb the queries, ``FlashAttnMLASparseImpl.forward_mqa`` (which also
converts the indices), value-up. A shape is ``heads x queries + context`` of one
request; heads are those of one rank. Both results are compared with a float64 oracle,
on two heads and the last 64 queries, before anything is timed.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from bench_common import (
    activate_overlay,
    argument_parser,
    on_sm90,
    print_table,
    require_gpu,
    save_csv,
    time_interleaved,
)

DEFAULT_SHAPES = (
    *(f"{heads}x{n}" for heads in (16, 128) for n in (2048, 4096, 8192, 16384)),
    "16x2048+6144",
    "16x4096+12288",
    "16x8192+8189",
    "128x2048+6144",
    "128x4096+4093",
)
# qk_nope_head_dim, qk_rope_head_dim, v_head_dim
MODELS = {"192/128": (128, 64, 128), "256/256": (192, 64, 256)}
BLOCK = 64
MASK_WORDS = 128 * 2**20 // 4  # vLLM's workspace
CHUNK_ROWS = 64 * 1024  # vLLM's at most
CHECK_HEADS, CHECK_ROWS = 2, 64


@dataclass(frozen=True)
class Shape:
    """Heads of one rank, queries, and the context before them."""

    heads: int
    queries: int
    context: int

    def __str__(self) -> str:
        text = f"{self.heads}x{self.queries}"
        return f"{text}+{self.context}" if self.context else text


def parse_shape(text: str) -> Shape:
    """Read ``heads x queries + context``.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", text)
    if match is None:
        raise ValueError(f"a shape must read like 16x4096 or 16x2048+6144, got {text}")
    return Shape(*(int(part or 0) for part in match.groups()))


def load_world_module():
    """The layer on vLLM's own metadata that the tests use as well."""
    root = Path(__file__).resolve().parents[1]
    path = root / "tests/v1/attention/sparse_mla_world.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case:
    """One shape of one model, ready to run in every way."""

    def __init__(self, shape: Shape, model: str, topk: int, device: torch.device):
        """Make weights, tokens, cache and metadata."""
        from vllm.v1.attention.backends.mla import flashattn_mla_sparse as backend
        from vllm.v1.attention.backends.mla.index_group import (
            SparseMLAIndexGroupBuilder,
        )

        module = load_world_module()
        nope, rope, v = MODELS[model]
        dims = module.Dims(shape.heads, 512, nope, rope, v, topk)
        length = shape.context + shape.queries
        self.world = world = module.World(
            device, [length], dims, block_size=BLOCK, max_tokens=shape.queries
        )
        self.step = world.step(
            [(0, shape.context, length)],
            chunk_rows=CHUNK_ROWS,
            mask_words=MASK_WORDS,
            metadata_cls=backend.FlashAttnMLASparseMetadata,
        )
        world.write_cache(self.step, with_new_tokens=True)
        world.cache.nan_to_num_(0.0)
        self.step.write_topk(world.topk_buffer)
        groups = SparseMLAIndexGroupBuilder(world.topk_buffer)
        indexer = SimpleNamespace(topk_indices_buffer=world.topk_buffer)
        self.leader = world.make_impl(indexer=indexer, index_group_builder=groups)
        self.follower = world.make_impl(
            topk_indices_buffer=world.topk_buffer, index_group_builder=groups
        )
        self.mqa_impl = world.make_impl(
            backend.FlashAttnMLASparseImpl, topk_indices_buffer=world.topk_buffer
        )
        weight = world.weight.view(shape.heads, nope + v, dims.kv_lora_rank)
        self.w_uk = weight[:, :nope].contiguous()
        self.w_uv = weight[:, nope:].transpose(1, 2).contiguous()
        self.outputs = {name: world.new_output(self.step) for name in self.variants()}

    def variants(self) -> dict[str, Callable[[int], object]]:
        """Functions that run the layer, by name."""
        return {"masked": self.masked, "reused": self.reused, "mqa": self.mqa}

    def masked(self, i: int = 0) -> None:
        """Masked MHA in the first layer of an index group."""
        self.world.forward(self.step, self.leader, self.outputs["masked"])

    def reused(self, i: int = 0) -> None:
        """Masked MHA in a layer that finds the mask of the first."""
        self.world.forward(self.step, self.follower, self.outputs["reused"])

    def mqa(self, i: int = 0) -> None:
        """Sparse MQA as vLLM's layer runs it: absorb, attend, value-up."""
        dims = self.world.dims
        parts = (dims.qk_nope_head_dim, dims.qk_rope_head_dim)
        q_nope, q_pe = self.step.q.split(parts, dim=-1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        latent_out, _ = self.mqa_impl.forward_mqa(
            (absorbed.contiguous(), q_pe.contiguous()),
            self.world.cache,
            self.step.metadata,
            None,
        )
        output = self.outputs["mqa"].view(-1, dims.num_heads, dims.v_head_dim)
        torch.bmm(latent_out.transpose(0, 1), self.w_uv, out=output.transpose(0, 1))

    def errors(self) -> dict[str, float]:
        """Each variant's largest error over its budget, on the rows that are checked.

        Sparse MQA rounds at other places, so its budget is that of an eager run of it.
        """
        from vllm_sparse_mla import reference

        world, dims = self.world, self.world.dims
        heads = slice(0, CHECK_HEADS)
        rows = slice(max(len(self.step.q) - CHECK_ROWS, 0), None)
        q, topk = self.step.q[rows, heads], self.step.topk[rows]
        latents = world.latents[0]
        w_uk, w_uv = self.w_uk[heads], self.w_uv[heads]
        lengths = [torch.tensor([0, n]) for n in (len(q), len(latents))]

        def attend(queries, k, v):
            scale, dtype = world.impl.scale, queries.dtype
            return reference.gathered_topk_attention(
                queries, k, v, *lengths, topk, softmax_scale=scale, dtype=dtype
            )[0]

        def mha(dtype):
            c = latents[:, : dims.kv_lora_rank].to(dtype)
            k_nope = torch.einsum("tr,hnr->thn", c, w_uk.to(dtype))
            k_pe = latents[:, None, dims.kv_lora_rank :].to(dtype)
            k = torch.cat((k_nope, k_pe.expand(-1, CHECK_HEADS, -1)), dim=-1)
            v = torch.einsum("tr,hrv->thv", c, w_uv.to(dtype))
            return attend(q.to(dtype), k, v)

        def eager_mqa():
            nope = dims.qk_nope_head_dim
            absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], w_uk)
            k = latents.unsqueeze(1)
            queries = torch.cat((absorbed, q[..., nope:]), dim=-1)
            out = attend(queries, k, k[..., : dims.kv_lora_rank])
            return torch.einsum("thr,hrv->thv", out, w_uv)

        exact = mha(torch.float64)
        budgets = {
            "masked": reference.attention_error_budget(exact, mha(torch.bfloat16)),
            "mqa": reference.attention_error_budget(exact, eager_mqa()),
        }
        budgets["reused"] = budgets["masked"]
        ratios = {}
        for name, output in self.outputs.items():
            output = output.view(-1, dims.num_heads, dims.v_head_dim)[rows, heads]
            error = reference.attention_error(output, exact)
            ratios[name] = float((error / budgets[name]).max())
        return ratios


def measure(shape: Shape, args, device: torch.device) -> list[dict]:
    """Check, then time every variant of one shape."""
    case = Case(shape, args.model, args.topk, device)
    variants = case.variants()
    for launch in variants.values():
        launch(0)
    ratios = case.errors()
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    if wrong:
        raise RuntimeError(f"{shape}: errors over budget {wrong}")
    timings = time_interleaved(variants, 1, args.repeat)
    rows = []
    for name, timing in timings.items():
        low, high = timing.spread_us
        rows.append(
            {
                "model": args.model,
                "shape": str(shape),
                "topk": args.topk,
                "variant": name,
                "median us": timing.median_us,
                "p10 us": low,
                "p90 us": high,
                "mqa / this": timings["mqa"].median_us / timing.median_us,
                "host us": timing.host_us,
                "error / budget": ratios[name],
                "samples": len(timing.samples),
            }
        )
    return rows


def draw(path: Path, rows: list[dict]) -> None:
    """Milliseconds of each variant, one group of bars per shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(1.5 + 0.9 * len(shapes), 4.5))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        heights = [row["median us"] / 1e3 for row in rows if row["variant"] == name]
        places = [place + number * width for place in range(len(shapes))]
        axes.bar(places, heights, width, label=name)
    ticks = [place + 0.4 - width / 2 for place in range(len(shapes))]
    axes.set_xticks(ticks, shapes, rotation=30)
    axes.set_yscale("log")
    axes.set_xlabel("heads x queries + context")
    axes.set_ylabel("milliseconds, median")
    axes.set_title(f"One layer's prefill, {torch.cuda.get_device_name()}")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, parse_shape, DEFAULT_SHAPES)
    parser.add_argument("--model", choices=MODELS, default="192/128")
    parser.add_argument("--topk", type=int, default=2048)
    args = parser.parse_args()
    device = require_gpu()
    if not on_sm90():
        sys.exit("This benchmark compares with SM90's sparse MQA backend.")
    activate_overlay(hopper=True)
    rows = []
    for shape in args.shapes:
        rows += measure(shape, args, device)
        torch.cuda.empty_cache()
    print_table(f"One layer step, {torch.cuda.get_device_name()}", rows)
    if args.csv is not None:
        save_csv(args.csv, rows)
    if args.plot is not None:
        draw(args.plot, rows)


if __name__ == "__main__":
    main()

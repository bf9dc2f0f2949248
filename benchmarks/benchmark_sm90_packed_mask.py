# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Is masked MHA worth taking on Hopper, and up to which lengths?

Part ``kernel``: FA4's SM90 kernel with the packed mask against the same kernel without
one. Part ``total``: one layer's prefill attention three ways, from the same latent
cache and weights, outputs compared before anything is timed:

- masked MHA: mask build, K/V projection, concatenation, FA4; with context also the
  gather of the latent context, a second projection and FA4 call, and the merge;
- sparse MQA of FLASH_ATTN_MLA_SPARSE: index conversion, absorb, FA3 over pages of one
  token, value-up;
- sparse MQA of FLASHMLA_SPARSE: the same with queries concatenated and padded to a
  multiple of 64 heads, FlashMLA's sparse prefill.

Candidates are captured as CUDA graphs and replayed in turns; a row gives the median
and the 20th and 80th percentile of its replays. Inputs stay where the last replay left
them, which for short prompts is the L2 cache, as right after a layer's projections.
Needs SM90.

    python benchmarks/benchmark_sm90_packed_mask.py --out results [--quick]
"""

import argparse
import csv
import os
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

os.environ["VLLM_SPARSE_MLA_SM90"] = "1"

import torch

import vllm
from vllm_sparse_mla.plugin import register

register()

LATENT = 512
TOPK = 2048
BLOCK_SIZE = 64
FLASHMLA_HEAD_MULTIPLE = 64
UPSTREAM_SHAPES = ((256, 2048), (1024, 8192), (4096, 32768))
MASKED, FA3, FLASHMLA = "masked MHA", "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"
# A candidate has to be this much faster before the table prefers it.
MARGIN = 1.05


@dataclass(frozen=True)
class Model:
    """Dimensions of one MLA model."""

    name: str
    num_heads: int
    nope: int
    rope: int
    v: int

    @property
    def qk(self) -> int:
        return self.nope + self.rope


DEEPSEEK = Model("DeepSeek-V3.2", 128, 128, 64, 128)
GLM = Model("GLM-5.x", 64, 192, 64, 256)


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@lru_cache(maxsize=1)
def random_topk(q_len: int, context: int) -> torch.Tensor:
    """Causal top-k of random scores: int32 [q_len, TOPK], -1 where keys run out."""
    seq_len = context + q_len
    topk = torch.full((q_len, TOPK), -1, dtype=torch.int32, device="cuda")
    keys = torch.arange(seq_len, device="cuda")
    for start in range(0, q_len, 1024):
        rows = slice(start, min(start + 1024, q_len))
        positions = context + torch.arange(rows.start, rows.stop, device="cuda")
        scores = torch.rand((len(positions), seq_len), device="cuda")
        scores.masked_fill_(keys > positions[:, None], -1)
        best = scores.topk(min(TOPK, seq_len))
        index = best.indices.int().masked_fill_(best.values < 0, -1)
        topk[rows, : index.shape[1]] = index
    return topk


def mask_storage(q_len: int, seq_len: int, reserve_word: bool) -> torch.Tensor:
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        _topk_mask_shape,
    )

    shape = _topk_mask_shape(1, q_len, seq_len, reserve_word)
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


def fa4(q, k, v, *, causal, mask=None, key_starts=None, lse=False, scalar=False):
    """FA4 on one request; the callback depends on what is given."""
    from vllm.model_executor.layers.attention import sparse_mla_mask
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.cute.mask import packed_mask_front
    from vllm_sparse_mla.codegen.word_callbacks import scalar_mask_mod

    masked = {}
    if mask is not None:
        aux = [mask] if key_starts is None else [mask, key_starts]
        if scalar:
            mask_mod = scalar_mask_mod
        elif key_starts is None:
            mask_mod = packed_mask_front(sparse_mla_mask.dense_mask_mod)
        else:
            mask_mod = packed_mask_front(sparse_mla_mask.offset_dense_mask_mod)
        masked = {
            "mask_mod": mask_mod,
            "aux_tensors": aux,
            "aux_tensor_leading_dims": [2, 0][: len(aux)],
        }
    return flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=_cumulative(q.shape[0]),
        cu_seqlens_k=_cumulative(k.shape[0]),
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0],
        softmax_scale=q.shape[2] ** -0.5,
        causal=causal,
        return_softmax_lse=lse,
        fa_version=4,
        num_splits=1,
        **masked,
    )


@cache
def _cumulative(length: int) -> torch.Tensor:
    return int32([0, length])


class Prefill:
    """One request's prefill attention in one layer, three ways.

    Args:
        model: Whose dimensions.
        heads: Heads of this rank.
        q_len: New tokens.
        context: Tokens before them, in the paged cache like the new ones.
    """

    def __init__(self, model: Model, heads: int, q_len: int, context: int):
        torch.manual_seed(0)
        self.model, self.heads = model, heads
        self.q_len, self.context = q_len, context
        seq_len = context + q_len
        self.scale = model.qk**-0.5
        self.q = randn(q_len, heads, model.qk)
        width = model.nope + model.v
        self.weight = randn(LATENT, heads * width, scale=LATENT**-0.5)
        per_head = self.weight.view(LATENT, heads, width)
        self.w_uk = per_head[..., : model.nope].permute(1, 2, 0).contiguous()
        self.w_uv = per_head[..., model.nope :].transpose(0, 1).contiguous()
        self.latent = randn(seq_len, LATENT + model.rope)
        num_blocks = -(-seq_len // BLOCK_SIZE)
        self.block_table = torch.randperm(num_blocks, device="cuda").int()[None]
        self.cache = randn(num_blocks, BLOCK_SIZE, LATENT + model.rope)
        positions = torch.arange(seq_len, device="cuda")
        blocks = self.block_table[0].long()[positions // BLOCK_SIZE]
        self.rows = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        self.cache.view(-1, LATENT + model.rope)[self.rows] = self.latent
        self.topk = random_topk(q_len, context)
        self.request_ids = torch.zeros(q_len, dtype=torch.int32, device="cuda")
        self.cu_tokens = torch.arange(q_len + 1, dtype=torch.int32, device="cuda")
        self.mask = mask_storage(q_len, seq_len, context > 0)
        self.suffix_start, self.chunk_start = int32([context]), int32([0])

    def _keys_and_values(self, latent: torch.Tensor):
        model = self.model
        kv = (latent[:, :LATENT] @ self.weight).view(
            -1, self.heads, model.nope + model.v
        )
        k = torch.empty((*kv.shape[:2], model.qk), dtype=kv.dtype, device=kv.device)
        k[..., : model.nope] = kv[..., : model.nope]
        k[..., model.nope :] = latent[:, None, LATENT:]
        return k, kv[..., model.nope :]

    def masked_mha(self) -> torch.Tensor:
        from vllm.model_executor.layers.attention.sparse_mla_attention import (
            _build_packed_topk_mask,
        )
        from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

        seq_len = self.context + self.q_len
        mask = _build_packed_topk_mask(
            self.topk, _cumulative(self.q_len), self.q_len, seq_len, self.mask
        )
        k, v = self._keys_and_values(self.latent[self.context :])
        if self.context == 0:
            return fa4(self.q, k, v, causal=True, mask=mask)
        suffix = fa4(
            self.q,
            k,
            v,
            causal=True,
            mask=mask,
            key_starts=self.suffix_start,
            lse=True,
        )
        # Stands for the gather from the paged cache, which moves the same bytes.
        gathered = self.cache.view(-1, self.cache.shape[2])[self.rows[: self.context]]
        k, v = self._keys_and_values(gathered)
        prefix = fa4(
            self.q,
            k,
            v,
            causal=False,
            mask=mask,
            key_starts=self.chunk_start,
            lse=True,
        )
        out = torch.empty_like(suffix[0])
        merge_attn_states(out, prefix[0], prefix[1], suffix[0], suffix[1])
        return out

    def _absorb_and_convert(self):
        from vllm.v1.attention.backends.mla.sparse_utils import (
            triton_convert_req_index_to_global_index,
        )

        physical, counts = triton_convert_req_index_to_global_index(
            self.request_ids,
            self.block_table,
            self.topk,
            BLOCK_SIZE=BLOCK_SIZE,
            NUM_TOPK_TOKENS=TOPK,
            return_valid_counts=True,
        )
        q_nope = self.q.new_empty((self.q_len, self.heads, LATENT))
        nope = self.q[..., : self.model.nope].transpose(0, 1)
        torch.bmm(nope, self.w_uk, out=q_nope.transpose(0, 1))
        return q_nope, self.q[..., self.model.nope :], physical, counts

    def _value_up(self, latent_out: torch.Tensor) -> torch.Tensor:
        out = self.q.new_empty((self.q_len, self.heads, self.model.v))
        torch.bmm(latent_out.transpose(0, 1), self.w_uv, out=out.transpose(0, 1))
        return out

    def mqa_fa3(self) -> torch.Tensor:
        from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        q_nope, q_rope, physical, counts = self._absorb_and_convert()
        rows, _ = flat_kv_row_view(self.cache, BLOCK_SIZE)
        out = flash_attn_varlen_func(
            q=q_rope,
            k=rows[:, LATENT:].unsqueeze(1).unsqueeze(1),
            v=rows[:, :LATENT].unsqueeze(1).unsqueeze(1),
            q_v=q_nope,
            max_seqlen_q=1,
            cu_seqlens_q=self.cu_tokens,
            max_seqlen_k=TOPK,
            seqused_k=counts,
            block_table=physical,
            softmax_scale=self.scale,
            causal=True,
            fa_version=3,
        )
        return self._value_up(out)

    def mqa_flashmla(self) -> torch.Tensor:
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

        q_nope, q_rope, physical, counts = self._absorb_and_convert()
        multiple = FLASHMLA_HEAD_MULTIPLE
        padded_heads = -(-self.heads // multiple) * multiple
        q = self.q.new_empty((self.q_len, padded_heads, LATENT + self.model.rope))
        q[:, : self.heads, :LATENT] = q_nope
        q[:, : self.heads, LATENT:] = q_rope
        out, _, _ = flash_mla_sparse_fwd(
            q,
            self.cache.view(-1, 1, self.cache.shape[2]),
            physical.view(self.q_len, 1, -1),
            self.scale,
            topk_length=counts,
        )
        return self._value_up(out[:, : self.heads])

    def candidates(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The three ways; one that this machine cannot run is left out, and said so."""
        ways = {MASKED: self.masked_mha, FA3: self.mqa_fa3, FLASHMLA: self.mqa_flashmla}
        reference = ways[MASKED]()
        usable = {MASKED: ways[MASKED]}
        for name in (FA3, FLASHMLA):
            try:
                out = ways[name]()
            except (RuntimeError, AttributeError, ImportError) as error:
                print(f"{name} does not run here: {error}", file=sys.stderr)
                continue
            difference = (out.float() - reference.float()).norm()
            relative = (difference / reference.float().norm()).item()
            if not relative < 3e-2:
                raise RuntimeError(
                    f"{name} and masked MHA must agree to 3e-2, differ by {relative}"
                )
            usable[name] = ways[name]
        return usable


def time_in_turns(
    candidates: dict[str, Callable], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds a call of each candidate in each round, replayed in turns."""
    graphs = {}
    for name, call in candidates.items():
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        # Enough calls a replay that its own launch is lost in them.
        repeats = max(1, min(20, round(1.0 / max(start.elapsed_time(end), 1e-3))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graphs[name] = graph, repeats
    marks = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, (graph, _) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            if turn > 0:
                marks[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) / graphs[name][1] for start, end in pairs]
        for name, pairs in marks.items()
    }


class Report:
    """Rows in the order they were measured, written to CSV as they come."""

    def __init__(self, path: Path):
        self.rows: list[dict] = []
        self._environment = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "cutlass_dsl": _version("nvidia-cutlass-dsl"),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
        }
        self._file = path.open("w", newline="")
        self._writer = None

    def add(self, times: dict[str, list[float]], baseline: str, **case) -> None:
        base = statistics.median(times[baseline])
        for name, samples in times.items():
            median = statistics.median(samples)
            p20, _, _, p80 = statistics.quantiles(samples, n=5)
            row = case | {
                "candidate": name,
                "median_ms": round(median, 5),
                "p20_ms": round(p20, 5),
                "p80_ms": round(p80, 5),
                "rounds": len(samples),
                "baseline": baseline,
                "ratio_to_baseline": round(median / base, 4),
            }
            self.rows.append(row)
            if self._writer is None:
                fields = [*row, *self._environment]
                self._writer = csv.DictWriter(self._file, fields)
                self._writer.writeheader()
            self._writer.writerow(row | self._environment)
        self._file.flush()


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed as a package"


def measure_kernel(report: Report, lengths, head_counts, rounds: int) -> None:
    """Masked against unmasked FA4 at 192/128."""

    def inputs(heads, q_len, k_len):
        q, k = randn(q_len, heads, DEEPSEEK.qk), randn(k_len, heads, DEEPSEEK.qk)
        return q, k, randn(k_len, heads, DEEPSEEK.v)

    case = {"part": "kernel", "model": DEEPSEEK.name, "tensor_parallel": ""}
    for q_len, k_len in UPSTREAM_SHAPES:
        qkv = inputs(8, q_len, k_len)
        mask = mask_storage(q_len, k_len, False).fill_(-1)[:, :q_len]
        times = time_in_turns(
            {
                "unmasked": lambda qkv=qkv: fa4(*qkv, causal=False),
                "packed mask": lambda qkv=qkv, mask=mask: fa4(
                    *qkv, causal=False, mask=mask
                ),
                "scalar callback": lambda qkv=qkv, mask=mask: fa4(
                    *qkv, causal=False, mask=mask, scalar=True
                ),
            },
            rounds,
        )
        shape = {"heads": 8, "q_len": q_len, "keys": k_len, "causal": False}
        report.add(times, "unmasked", **case, **shape)
    for length in lengths:
        mask = _causal_mask(length)
        for heads in head_counts:
            qkv = inputs(heads, length, length)
            times = time_in_turns(
                {
                    "unmasked": lambda qkv=qkv: fa4(*qkv, causal=True),
                    "packed mask": lambda qkv=qkv, mask=mask: fa4(
                        *qkv, causal=True, mask=mask
                    ),
                },
                rounds,
            )
            shape = {"heads": heads, "q_len": length, "keys": length, "causal": True}
            report.add(times, "unmasked", **case, **shape)


def _causal_mask(length: int) -> torch.Tensor:
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        _build_packed_topk_mask,
    )

    storage = mask_storage(length, length, False)
    topk = random_topk(length, 0)
    return _build_packed_topk_mask(topk, _cumulative(length), length, length, storage)


def measure_totals(report: Report, model, parallel, prefills, rounds: int) -> None:
    """One layer's attention three ways. ``prefills``: pairs of q_len and context."""
    for q_len, context in prefills:
        for size in parallel:
            heads = model.num_heads // size
            prefill = Prefill(model, heads, q_len, context)
            times = time_in_turns(prefill.candidates(), rounds)
            report.add(
                times,
                MASKED,
                part="total",
                model=model.name,
                tensor_parallel=size,
                heads=heads,
                q_len=q_len,
                keys=q_len + context,
                causal=True,
            )
            del prefill
            torch.cuda.empty_cache()


def derive_thresholds(rows: list[dict]) -> dict:
    """The table that ``sparse_mla_sm90`` holds, from the rows of part ``total``.

    A pure prefill is admitted up to the longest measured length such that masked MHA
    won there and at every shorter one. With context, a sequence length admits the
    query lengths from which on masked MHA always won, as long as some did.
    """
    dims = {m.name: (m.qk, m.v) for m in (DEEPSEEK, GLM)}
    wins: dict[tuple, dict[tuple[int, int], bool]] = {}
    for row in rows:
        if row["part"] == "total" and row["candidate"] != MASKED:
            key = (dims[row["model"]], row["candidate"], row["tensor_parallel"])
            won = row["ratio_to_baseline"] >= MARGIN
            wins.setdefault(key, {})[row["keys"], row["q_len"]] = won
    table: dict = {}
    for (dim, backend, size), results in sorted(wins.items()):
        longest = 0
        for (keys, q_len), won in sorted(results.items()):
            if keys == q_len and keys > TOPK:
                if not won:
                    break
                longest = keys
        pure = ((longest, 0),) if longest else ()
        context = []
        for seq_len in sorted({keys for keys, q_len in results if keys != q_len}):
            shortest = None
            queries = sorted((q for k, q in results if k == seq_len != q), reverse=True)
            for q_len in queries:
                if not results[seq_len, q_len]:
                    break
                shortest = q_len
            if shortest is None:
                break
            context.append((seq_len, shortest))
        rows_of = table.setdefault(dim, {}).setdefault(backend, {})
        rows_of[size] = (pure, tuple(context))
    return table


def print_tables(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("model", "tensor_parallel", "heads", "q_len", "keys", "causal")
    values = ("candidate", "median_ms", "p20_ms", "p80_ms", "ratio_to_baseline")
    for part in ("kernel", "total"):
        rows = [row for row in report.rows if row["part"] == part]
        if not rows:
            continue
        table = Table(title=f"{part}, times in ms, against {rows[0]['baseline']}")
        for name in columns + values:
            table.add_column(name, justify="right" if name != "candidate" else "left")
        for row in rows:
            table.add_row(*(str(row[name]) for name in columns + values))
        Console(width=140).print(table)


def plot(rows: list[dict], path: Path) -> None:
    """Total time over prompt length; where two lines cross, the better way changes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pure = [r for r in rows if r["part"] == "total" and r["q_len"] == r["keys"]]
    shown = [r for r in pure if r["model"] == DEEPSEEK.name]
    head_counts = sorted({r["heads"] for r in shown})
    figure, axes = pyplot.subplots(1, len(head_counts), squeeze=False, figsize=(11, 4))
    for axis, heads in zip(axes[0], head_counts):
        for name in (MASKED, FA3, FLASHMLA):
            line = [r for r in shown if r["heads"] == heads and r["candidate"] == name]
            lengths = [r["q_len"] for r in line]
            axis.plot(lengths, [r["median_ms"] for r in line], "o-", label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{heads} heads")
        axis.set_xlabel("prompt length in tokens")
        axis.set_ylabel("one layer's prefill attention, ms")
        axis.legend()
    figure.suptitle(f"{DEEPSEEK.name} on {torch.cuda.get_device_name()}, BF16")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and rounds")
    parser.add_argument("--part", choices=("kernel", "total", "all"), default="all")
    args = parser.parse_args()
    if torch.cuda.get_device_capability()[0] != 9:
        sys.exit("this benchmark needs compute capability 9.0")
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out / "hopper-h200.csv")
    rounds = 7 if args.quick else 11
    lengths = (2048, 4096, 8192) if args.quick else (2048, 4096, 8192, 16384)
    if args.part != "total":
        measure_kernel(report, lengths, (16, 128), rounds)
    if args.part != "kernel":
        prefills = [(length, 0) for length in lengths]
        if args.quick:
            prefills.append((1021, 7171))
            measure_totals(report, DEEPSEEK, (8, 1), prefills, rounds)
        else:
            for seq_len in (8192, 16384, 32768):
                prefills += [(q, seq_len - q) for q in (512, 1024, 2048, 4096)]
            for model in (DEEPSEEK, GLM):
                measure_totals(report, model, (1, 2, 4, 8), prefills, rounds)
        print("derived thresholds:", derive_thresholds(report.rows))
    # Results are on disk by now, whatever the libraries below say.
    print_tables(report)
    if args.part != "kernel":
        plot(report.rows, args.out / "hopper-h200.png")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What does the first prompt of each length pay to have its mask built?

    python3 benchmarks/benchmark_first_call.py --csv first.csv --plot first.png

After a warm-up, each variant builds the masks of distinct prompt lengths, each twice.
Times are wall-clock milliseconds from the call to the finished mask. ``stock`` warms
up by building one mask of another length, as do ``triton`` and ``cutedsl``, the latter
after vLLM's start-up compilation of its warm-up keys. Triton and the CuTe DSL begin
with empty caches on disk. Compilations are counted by Triton's hook and around
``cute.compile``.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from bench_common import (
    activate_overlay,
    argument_parser,
    require_gpu,
    save_results,
    with_progress,
)
from result_sections import first_calls

from vllm_sparse_mla.testing.masks import expected_mask
from vllm_sparse_mla.testing.stock import load_stock_module

MODULE = "vllm.model_executor.layers.attention.sparse_mla_attention"
TOPK = 2048
WARM_UP_LENGTH = 3000
SHORTEST, LONGEST, COUNT = 2049, 16384, 50


def default_lengths() -> list[int]:
    """Distinct prompt lengths, the same in every run."""
    everything = [n for n in range(SHORTEST, LONGEST) if n != WARM_UP_LENGTH]
    return random.Random(0).sample(everything, COUNT)


@contextmanager
def counted_compilations() -> Iterator[Callable[[], int]]:
    """Yield a function that tells how many kernels were compiled so far."""
    import cutlass.cute as cute
    from triton import knobs

    noted = mock.Mock()
    with (
        mock.patch.object(cute, "compile", mock.Mock(wraps=cute.compile)) as compiled,
        mock.patch.object(knobs.runtime, "jit_post_compile_hook", noted),
    ):
        yield lambda: compiled.call_count + noted.call_count


def make_builders() -> dict[str, Callable]:
    """By variant, a function of top-k rows, cumulative lengths, length and mask."""
    from vllm.model_executor.kernels.attention.dsa import topk_mask as ours

    stock = load_stock_module(MODULE)

    def build_stock(topk, cu_q_lens, length, out):
        stock._build_topk_mask([topk], [length], length, length, out)

    def build_triton(topk, cu_q_lens, length, out):
        ours.build_topk_mask_triton(topk, cu_q_lens, length, length, out)

    def build_cutedsl(topk, cu_q_lens, length, out):
        ours.build_packed_topk_mask(topk, cu_q_lens, length, length, out)

    return {"stock": build_stock, "triton": build_triton, "cutedsl": build_cutedsl}


def warm_up_cutedsl() -> None:
    """Compile what vLLM's start-up would."""
    from vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl import (
        TOPK_MASK_KERNEL,
    )

    config = SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=TOPK))
    TOPK_MASK_KERNEL.warmup(SimpleNamespace(model_config=config))


def make_inputs(length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k rows of one request, keys up to the query in any order, and its lengths."""
    visible = torch.arange(1, length + 1, device=device)[:, None]
    topk = (torch.rand(length, TOPK, device=device) * visible).int()
    cu_q_lens = torch.tensor([0, length], dtype=torch.int32, device=device)
    return topk.minimum(visible.int() - 1), cu_q_lens


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call, to the end of its work on the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(lengths: list[int], repeat: int, device) -> list[dict]:
    """One row for each length and variant."""
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        _topk_mask_shape,
    )

    builders = make_builders()
    warm_up_cutedsl()
    workspace = torch.empty(1 << 25, dtype=torch.int32, device=device)
    rows = []
    with counted_compilations() as compilations:
        for length in with_progress((WARM_UP_LENGTH, *lengths), "lengths"):
            topk, cu_q_lens = make_inputs(length, device)
            shape = _topk_mask_shape(1, length, length)
            out = workspace[: shape[1] * shape[2]].view(shape)
            for name, build in builders.items():
                out.fill_(0)

                def call(build=build, topk=topk, cu=cu_q_lens, n=length, out=out):
                    build(topk, cu, n, out)

                before = compilations()
                first = timed(call)
                compiled = compilations() - before
                some = [0, length // 2, length - 1]
                words = expected_mask(topk[some], [3], 3, length, out.shape[2])
                if not torch.equal(out[:, some], words):
                    raise RuntimeError(f"{name} builds a wrong mask for {length} keys")
                again = statistics.median(timed(call) for _ in range(repeat))
                if length != WARM_UP_LENGTH:
                    rows.append(
                        {
                            "length": length,
                            "variant": name,
                            "first call ms": first,
                            "later calls ms": again,
                            "compilations": compiled,
                        }
                    )
    return rows


def main() -> None:
    """Command line."""
    shapes = list(map(str, default_lengths()))
    parser = argument_parser(__doc__, int, shapes)
    args = parser.parse_args()
    device = require_gpu()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
        activate_overlay()
        torch.manual_seed(0)
        rows = measure(args.shapes, args.repeat, device)
    print(f"First mask of each prompt length, {torch.cuda.get_device_name()}\n")
    print(first_calls(rows))
    save_results(args, rows)


if __name__ == "__main__":
    main()

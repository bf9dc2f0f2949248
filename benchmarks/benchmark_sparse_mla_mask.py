# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What does a bit-packed mask cost inside FlashAttention-4?

    python3 benchmarks/benchmark_sparse_mla_mask.py --csv mask.csv --plot mask.png

The same attention call (BF16, ``num_splits=1``, with LSE) unmasked and with each
callback, the same bits read by all. On SM100: ``one word`` is 32 keys a call, ``stock``
the installed vLLM's callback, ``ours`` this project's. On SM90: ``one key``
is the only form that stock FA4 takes there, and only without ``causal``; ``ours`` is
the packed callback with this project's mask application. Shapes are explained in
mask_cases.py; the first three are those of vLLM's own pull request.

Before a case is timed, outputs and LSE of old and new callbacks must be identical bit
by bit. Where SM90 has no old callback to compare with: the same as the unmasked causal
kernel for a mask of all keys, else within 1 % of ``one key`` without ``causal``.

On SM100 the patch set also edits FA4's causal kernel, which serves every callback:
``--stock`` times the kernels and callbacks of stock vLLM, in a run of their own.

Without a GPU nothing is timed: the table is then of what the kernels compile to.
"""

import sys
from collections.abc import Callable

import torch
from bench_common import (
    CheckFailed,
    activate_overlay,
    argument_parser,
    measure_all,
    num_buffers,
    on_sm90,
    print_table,
    save_csv,
    save_results,
    time_interleaved,
)
from mask_cases import Case, Inputs, parse_case
from result_sections import mask_details, mask_times

from vllm_sparse_mla.overlay import active_finder
from vllm_sparse_mla.testing.stock import load_stock_module

MASK_MODULE = "vllm.model_executor.layers.attention.sparse_mla_mask"
UNMASKED, ONE_KEY, ONE_WORD = "unmasked", "one key", "one word"
STOCK, OURS = "stock", "ours"
STOCK_VLLM = "stock vLLM"
UPSTREAM_SHAPES = (
    "1x256x2048/8/ones",
    "1x1024x8192/8/ones",
    "1x4096x32768/8/ones",
)
SHAPES = (
    *UPSTREAM_SHAPES,
    *(f"{shape}/offset" for shape in UPSTREAM_SHAPES),
    *(
        f"1x{length}x{length}/{heads}/ones/causal"
        for heads in (16, 128)
        for length in (2048, 4096, 8192, 16384)
    ),
    *(f"1x4096x32768/8/{mask}" for mask in ("uniform", "recent", "clustered")),
    *(f"1x8192x8192/16/{mask}/causal" for mask in ("uniform", "recent", "clustered")),
    "1x4096x16384/16/uniform/offset",
    "8x8192x8192/16/uniform/causal",
    "8x8192x32768/16/uniform",
    *(f"{shape}/256" for shape in UPSTREAM_SHAPES),
    "1x4096x4096/8/ones/causal/256",
    "1x8192x8192/8/ones/causal/256",
)
FORMULAS = (
    "TFLOP/s = 2 x (qk + v dims) x heads x pairs of query and key that dense attention "
    "looks at / time; GB/s = (Q, K, V, output and mask once) / time"
)
MAX_RELATIVE_DIFFERENCE = 1e-2


def callbacks(case: Case) -> dict[str, Callable]:
    """The callbacks that can serve a case on this GPU, by the name of the variant."""
    from vllm_sparse_mla.codegen import word_callbacks

    name = "offset_dense_mask_mod" if case.offset else "dense_mask_mod"
    if on_sm90():
        plain = not (case.causal or case.offset)
        found = {ONE_KEY: word_callbacks.scalar_mask_mod} if plain else {}
    else:
        found = {} if case.offset else {ONE_WORD: word_callbacks.word_mask_mod}
        found |= {STOCK: getattr(load_stock_module(MASK_MODULE), name)}
    if active_finder() is not None:
        from vllm.model_executor.layers.attention import sparse_mla_mask

        found |= {OURS: getattr(sparse_mla_mask, name)}
    return found


def attend(
    inputs: Inputs,
    i: int,
    callback: Callable | None,
    mask: torch.Tensor | None = None,
    causal: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FA4 on buffer `i`: output ``[tokens, heads, dim]`` and LSE."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    case, masked = inputs.case, {}
    if callback is not None:
        aux_tensors = [inputs.masks[i] if mask is None else mask]
        masked = dict(
            mask_mod=callback, aux_tensors=aux_tensors, aux_tensor_leading_dims=[2]
        )
    return flash_attn_varlen_func(
        q=inputs.q[i],
        k=inputs.k[i],
        v=inputs.v[i],
        cu_seqlens_q=inputs.cu_q,
        cu_seqlens_k=inputs.cu_k,
        max_seqlen_q=max(case.q_lens),
        max_seqlen_k=max(case.k_lens),
        softmax_scale=case.dims[0] ** -0.5,
        causal=case.causal if causal is None else causal,
        return_softmax_lse=True,
        fa_version=4,
        num_splits=1,
        **masked,
    )


def check(inputs: Inputs, found: dict[str, Callable]) -> str:
    """Compare the callbacks' outputs; says with what, and what came out.

    Raises:
        CheckFailed: they do not agree.
    """
    case = inputs.case
    if OURS not in found:
        return ""
    out, lse = attend(inputs, 0, found[OURS])
    expected = {name: attend(inputs, 0, found[name]) for name in found if name != OURS}
    if on_sm90() and case.causal and case.mask == "ones":
        expected = {UNMASKED: attend(inputs, 0, None)}
    elif on_sm90() and not expected:
        from vllm_sparse_mla.codegen.word_callbacks import scalar_mask_mod

        other = attend(inputs, 0, scalar_mask_mod, inputs.plain_mask, causal=False)
        if case.causal:
            difference = (out.float() - other[0].float()).norm()
            relative = float(difference / other[0].float().norm())
            if not relative <= MAX_RELATIVE_DIFFERENCE:
                raise CheckFailed(f"it differs from {ONE_KEY} by {relative:.2e}")
            return f"{ONE_KEY}, not causal: {relative:.1e}"
        expected = {ONE_KEY: other}
    for name, (other_out, other_lse) in expected.items():
        if not (torch.equal(out, other_out) and torch.equal(lse, other_lse)):
            raise CheckFailed(f"{OURS} and {name} are not identical")
    return f"{' and '.join(expected)}: identical"


def measure(case: Case, repeat: int) -> list[dict]:
    """Check, then time the variants of a case.

    Raises:
        CheckFailed: see `check`.
    """
    torch.manual_seed(0)
    inputs = Inputs(case, num_buffers, torch.device("cuda"))
    found = callbacks(case)
    checked = check(inputs, found)
    launches = {UNMASKED: lambda i: attend(inputs, i, None)}
    for name, callback in found.items():
        launches[name] = lambda i, callback=callback: attend(inputs, i, callback)
    timings = time_interleaved(launches, len(inputs.q), repeat)
    rows = []
    for name, timing in timings.items():
        rows.append(
            {
                "shape": str(case),
                "dims": "/".join(map(str, case.dims)),
                "density": round(inputs.density, 4),
                "variant": name if OURS in found else f"{name}, {STOCK_VLLM}",
            }
            | timing.columns()
            | {
                "this / unmasked": timing.median_us / timings[UNMASKED].median_us,
                "TFLOP/s": case.flops / timing.median_us / 1e6,
                "GB/s": inputs.num_bytes / timing.median_us / 1e3,
                "checked against": checked if name == OURS else "",
                "samples": len(timing.samples),
                "buffers": len(inputs.q),
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__, parse_case, SHAPES)
    parser.add_argument(
        "--stock",
        action="store_true",
        help="without the patch set: FA4's kernels and callbacks as vLLM has them",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        default=["sm_100a", "sm_90a"],
        help="targets to compile for where there is no GPU",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        from compiled_masks import compiled_masks

        rows = [r for arch in args.arch for r in compiled_masks(args.shapes, arch)]
        print_table("Nothing was timed: torch sees no GPU. Machine code:", rows)
        if args.csv is not None:
            save_csv(args.csv, rows)
        return
    if not args.stock:
        activate_overlay(hopper=True)
    rows, failed = measure_all(
        args.shapes, lambda case: measure(case, args.repeat), args.csv
    )
    if rows:
        gpu = torch.cuda.get_device_name()
        print(f"Masked attention on {gpu}: ms, and % over unmasked\n")
        print(mask_times(rows))
        if not args.stock:
            print(f"\n{FORMULAS}\n\n{mask_details(rows)}")
        save_results(args, rows)
    if failed:
        sys.exit("some cases were not timed, because their outputs do not agree")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What one layer step launches, copies, allocates and compiles, stock's beside ours.

Stock's layer runs with this project's callbacks, as FA4 takes no others on SM90.
SPARSE_MLA_REPORT names a file for the counts as JSON lines.
"""

import collections
import itertools
import time
from dataclasses import replace

import pytest
import torch

from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm_sparse_mla.testing.layer import DEEPSEEK, Dims, Projection
from vllm_sparse_mla.testing.stock import load_stock_module

pytestmark = pytest.mark.gpu

PURE = [(0, 0, 600), (1, 0, 300), (2, 0, 129)]
CONTEXT = [(0, 325, 640), (1, 389, 700)]
CASES = {
    "pure, one request": dict(spans=PURE[:1]),
    "pure, three requests": dict(spans=PURE),
    "context, one chunk": dict(spans=CONTEXT),
    "context, many chunks": dict(spans=CONTEXT, chunk_rows=192),
    "context, many chunks, a mask a range": dict(
        spans=CONTEXT, chunk_rows=192, per_range=True
    ),
}
KINDS = {
    "mask": ("topkmask", "topk_mask", "scatter_topk"),
    "attention": ("flashattention", "flash_fwd", "flashfwd"),
    "merge": ("merge_attn_states",),
    "gather": ("gather_and_maybe_dequant",),
    "copy to device": ("memcpy htod",),
    "copy to host": ("memcpy dtoh",),
}


@pytest.fixture
def world(make_world):
    dims = replace(DEEPSEEK, num_heads=16, index_topk=256)
    return make_world([700] * 3, dims=dims, block_size=64)


def prepared(world, name, impl=None):
    """A step of which all is in place, and the call of the layer alone."""
    step = world.step(**CASES[name])
    world.write_cache(step)
    step.write_topk(world.topk_buffer)
    output = world.new_output(step)

    def call():
        world.forward(step, impl or world.impl, output)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return step, output, call


def launches(call):
    """Names of all that a call puts on the device, in order."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):  # the profiler's own start-up may lose a launch
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [e.name for e in profile.events() if e.device_type == on_device]


def count(names):
    counts = collections.Counter()
    for name in names:
        kinds = [
            k for k, parts in KINDS.items() if any(p in name.lower() for p in parts)
        ]
        counts[kinds[0] if kinds else "other"] += 1
    return counts


def stock_impl(world):
    """The layer of the installed vLLM's own file, whatever replaces the module."""
    stock = load_stock_module(sparse_mla_attention.__name__)
    if hasattr(stock.SparseMLACommonImpl, "_build_whole_topk_mask"):
        pytest.skip("the installed vLLM has this patch")
    impl = world.make_impl(
        stock.SparseMLACommonImpl, topk_indices_buffer=world.topk_buffer
    )
    return impl


@pytest.mark.parametrize("name", CASES)
def test_launches(world, report, monkeypatch, name):
    import vllm.vllm_flash_attn as package

    step, _, call = prepared(world, name)
    names = launches(call)
    ours = count(names)
    attend, asked = package.flash_attn_varlen_func, []
    with monkeypatch.context() as patch:
        patch.setattr(
            package,
            "flash_attn_varlen_func",
            lambda **kwargs: (asked.append(kwargs), attend(**kwargs))[1],
        )
        call()
    attention = len(launches(lambda: attend(**asked[0])))
    rank = world.dims.kv_lora_rank
    latents, k_pe = step.latents[:, :rank], step.latents[:, rank:].unsqueeze(1)
    projection = len(launches(lambda: world.impl._project_kv(latents, k_pe)))
    context = step.metadata.prefill.chunked_context
    chunks = 0 if context is None else len(context.chunks)

    _, _, call_stock = prepared(world, name, stock_impl(world))
    stock = count(launches(call_stock))
    report(
        kind="launches",
        case=name,
        chunks=chunks,
        projection=projection,
        attention=attention,
        ours=dict(ours),
        stock=dict(stock),
        ours_total=sum(ours.values()),
        stock_total=sum(stock.values()),
        ours_names=names,
    )
    assert ours["copy to device"] == ours["copy to host"] == 0
    assert ours["mask"] == (1 + chunks if "a range" in name else 1)
    assert ours["attention"] == (1 if world.takes_one_pass(step) else 1 + chunks)
    assert ours["gather"] == chunks
    if not chunks:
        # The projection, the mask, and what FA4's one call launches.
        assert len(names) == projection + 1 + attention, names


def test_launches_do_not_grow_with_the_requests(world):
    one, three = (
        len(launches(prepared(world, name)[2]))
        for name in ("pure, one request", "pure, three requests")
    )
    assert one == three


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(world, name):
    _, _, call = prepared(world, name)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_allocated_beyond_what_is_called(world, report, monkeypatch, name):
    """All allocations happen inside FA4's call, the projection and upstream's merge."""
    import vllm.vllm_flash_attn as package

    inside = 0

    def allocations():
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    def counting(function):
        def counted(*args, **kwargs):
            nonlocal inside
            before = allocations()
            result = function(*args, **kwargs)
            inside += allocations() - before
            return result

        return counted

    impl = world.impl
    for owner, attribute in (
        (package, "flash_attn_varlen_func"),
        (mla_attention, "init_mla_context_partial"),
        (mla_attention, "accumulate_mla_context_chunk"),
        (Projection, "__call__"),
    ):
        monkeypatch.setattr(owner, attribute, counting(getattr(owner, attribute)))
    impl._concat_k_nope_k_pe = counting(impl._concat_k_nope_k_pe)
    _, _, call = prepared(world, name)
    inside = 0
    before = allocations()
    call()
    total = allocations() - before
    report(kind="allocations", case=name, total=total, inside_calls=inside)
    assert total == inside


def compiled():
    """The kernels of FA4, for masks and for K that are compiled, and their owners."""
    from vllm.model_executor.kernels.attention.dsa.concat_mla_k import (
        CONCAT_MLA_K_KERNEL,
    )
    from vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl import (
        TOPK_MASK_KERNEL,
    )
    from vllm.vllm_flash_attn.cute import interface

    functions = (
        interface._flash_attn_fwd,
        interface._compute_tile_cumsum,
        interface._compute_blocks_to_batch,
    )
    caches = [function.compile_cache.cache for function in functions]
    caches.append(TOPK_MASK_KERNEL._compiled_cache)
    caches.append(CONCAT_MLA_K_KERNEL.kernel.device_caches[0][0])
    return caches, TOPK_MASK_KERNEL, CONCAT_MLA_K_KERNEL


LENGTHS = {
    "long": [
        *([(0, 0, n)] for n in (257, 1000, 4097)),
        [(0, 0, 5000), (1, 0, 3), (2, 0, 700), (3, 0, 1), (4, 0, 64)],
        [(0, 37, 330), (1, 4000, 5000)],
        [(0, 4700, 5000)],
    ],
    "short": [
        *([(0, 0, n)] for n in (1, 127, 128, 129, 256)),
        [(0, 1, 2)],
        [(0, 4999, 5000), (1, 37, 130)],
    ],
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dims", [(128, 64, 128), (192, 64, 256)], ids=str)
def test_after_warm_up_no_length_compiles(make_world, report, dims, lengths):
    from vllm.model_executor.layers.attention import sparse_mla_warmup

    nope, rope, v = dims
    caches, builder, concat = compiled()
    for cache in caches:
        cache.clear()
    start = time.perf_counter()
    kernel = sparse_mla_warmup.FA4_MASKED_MHA_KERNEL
    query_lens = {"long": (8192,), "short": (128, 256, 8192)}[lengths]
    for masked_call, num_requests, query_len in itertools.product(
        sparse_mla_warmup.masked_calls(), (1, 2), query_lens
    ):
        kernel.compile(
            kernel.CompileKey(
                masked_call, 16, *dims, torch.bfloat16, num_requests, query_len
            )
        )
    fa4_seconds = time.perf_counter() - start
    builder.compile(builder.CompileKey(vectorized=True))
    concat.compile(concat.CompileKey(16, *dims, torch.bfloat16))
    seconds = time.perf_counter() - start
    warmed = [len(cache) for cache in caches]

    world = make_world(
        [5000, 5000, 700, 64, 64],
        dims=Dims(16, 512, nope, rope, v, 256),
        block_size=64,
        max_tokens=16384,
    )
    for spans in LENGTHS[lengths]:
        for per_range in (False, True):
            step = world.step(spans, chunk_rows=1024, per_range=per_range)
            if world.impl.masked_mha_workspace_fits(step.metadata.prefill):
                world.run(step)
    torch.cuda.synchronize()
    after = [len(cache) for cache in caches]
    report(
        kind="warm-up",
        dims=f"{nope + rope}/{v}",
        lengths=lengths,
        fa4_seconds=fa4_seconds,
        builder_seconds=seconds - fa4_seconds,
        kernels=warmed,
        after=after,
    )
    assert after == warmed

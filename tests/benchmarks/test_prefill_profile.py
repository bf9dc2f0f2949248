# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The profile of a prefill: groups of kernels, traces, rows; kernels are made up."""

import asyncio
import contextlib
import json

import benchmark_prefill_profile
import pytest
import torch
from aiohttp import ClientResponseError, web
from aiohttp.test_utils import TestServer
from benchmark_prefill_profile import measure, rows_of_kernels
from kernel_groups import GROUPS, OTHER, group_of
from result_sections import ALL_KERNELS, FIRST_TOKEN, profile_totals
from result_tables import read_rows
from serving.client import open_session
from serving.profiler import (
    GPU_WORK,
    Kernel,
    profiler_arguments,
    profiling,
    read_trace,
)

from vllm.config import ProfilerConfig
from vllm.entrypoints.serve.profile.api_router import StartProfileRequest
from vllm.profiler.wrapper import TorchProfilerWrapper

# As they stand in vLLM's, PyTorch's and FlashMLA's libraries, in Triton's functions and
# in what the CuTe DSL compiled; argument lists are cut off.
KERNELS = {
    "_scatter_topk_kernel": "mask",
    "kernel_cutlass_kernel_vllmmodel_executorkernelsattentiondsatopk_mask_cutedsl_"
    "TopkMaskProgram_object_at__tensorptri32gmemoi641_0": "mask",
    "kernel_cutlass_kernel_vllmvllm_flash_attncuteflash_fwd_sm90FlashAttentionForward"
    "Sm90_object_at__tensor000o111012_tensor000o111012__0": "attention",
    "void legacy::sm90::prefill::sparse_fwd::sparse_attn_fwd_kernel<legacy::sm90::"
    "prefill::sparse_fwd::KernelTemplate<512, false>": "attention",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<1, cute::tuple<cute::C<1>": "attention",
    "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int": "attention",
    "void vllm::merge_attn_states_kernel<__nv_bfloat16, __nv_bfloat16, 128u, true>(": (
        "attention"
    ),
    "_fused_q_kernel": "indexer",
    "kernel_cutlass_kernel_vllmmodelsdeepseek_v32nvidiaopsfused_q_cutedslFusedQKernel"
    "_object_at__tensorptri64gmemo1_0": "indexer",
    "void deep_gemm::sm90_fp8_mqa_logits<64u, 128u, false, 2u, 256u>(": "indexer",
    "void vllm::cp_gather_indexer_k_quant_cache_kernel<16>(char const*": "indexer",
    "void vllm::topKPerRowPrefill<512, false>(float const*, int const*": "top-k",
    "void vllm::persistent::persistent_topk_kernel<1024, 1u>(vllm::": "top-k",
    "sparse_mla_index_remap_kernel": "top-k",
    "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16": "KV cache",
    "void vllm::gather_and_maybe_dequant_cache_page<__nv_bfloat16": "KV cache",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous"
    " namespace)::OpaqueType<2u>, unsigned int, 3, 64, 64>(": "layout",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at"
    "::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda": "layout",
    "_concat_mla_k_kernel": "layout",
    "Memcpy DtoD (Device -> Device)": "layout",
    "_fused_norm_rope_kernel": "norms",
    "void vllm::rms_norm_kernel<c10::BFloat16, 16, 2, false>(c10::BFloat16*": "norms",
    "void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162, &(c10": "norms",
    "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_TNN": "projections",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16": (
        "projections"
    ),
    "void gemv2N_kernel<int, int, __nv_bfloat16, __nv_bfloat16": "projections",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
    "ArgMaxOps<float>, unsigned int, long, 4, 4> >(": OTHER,
    "Memcpy HtoD (Pinned -> Device)": OTHER,
    "Memset (Device)": OTHER,
    "_compute_slot_mappings_kernel": OTHER,
}
MILLISECONDS = {"_fused_q_kernel": 4.0, "nvjet_a": 2.0, "nvjet_b": 1.0, "Memset": 0.5}


@pytest.mark.parametrize(("kernel", "group"), KERNELS.items(), ids=map(str, KERNELS))
def test_a_kernel_has_a_group(kernel, group):
    assert group_of(kernel) == group


def test_every_group_has_a_kernel_here():
    assert set(KERNELS.values()) == {*GROUPS, OTHER}


def events(cat: str, **us: float) -> list[dict]:
    return [{"ph": "X", "cat": cat, "name": k, "dur": v} for k, v in us.items()]


@pytest.fixture
def profiler_url(tmp_path):
    """A server that has vLLM's profiler of a worker behind vLLM's two paths."""
    flag, config = profiler_arguments(tmp_path)
    assert flag == "--profiler-config"
    config = ProfilerConfig(**json.loads(config))
    running = []

    async def start(http: web.Request) -> web.Response:
        name = StartProfileRequest(**await http.json()).profile_prefix
        if name == "refused":
            return web.Response(status=400)
        worker = TorchProfilerWrapper(config, f"{name}_rank0", 0, ["CPU"])
        worker.start()
        running.append(worker)
        return web.Response()

    async def stop(http: web.Request) -> web.Response:
        running.pop().stop()
        return web.Response()

    @contextlib.asynccontextmanager
    async def serve():
        app = web.Application()
        app.router.add_post("/start_profile", start)
        app.router.add_post("/stop_profile", stop)
        async with TestServer(app) as server:
            yield f"http://{server.host}:{server.port}"

    return serve


def test_a_trace_comes_from_vllms_profiler(profiler_url, tmp_path):
    async def run():
        async with profiler_url() as url, open_session() as session:
            async with profiling(session, url, "opt-in-4096-0"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            with pytest.raises(ClientResponseError):
                async with profiling(session, url, "refused"):
                    pass

    asyncio.run(run())
    (file,) = tmp_path.glob("*.json")
    trace = json.loads(file.read_text())
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    with pytest.raises(RuntimeError, match="opt-in-4096-0 has no kernel"):
        read_trace(tmp_path, "opt-in-4096-0")
    for cat in GPU_WORK:
        trace["traceEvents"] += events(cat, **{"_fused_q_kernel": 1500, cat: 250})
    file.write_text(json.dumps(trace))
    found = read_trace(tmp_path, "opt-in-4096-0")
    assert found == {cat: Kernel(1, 0.25) for cat in GPU_WORK} | {
        "_fused_q_kernel": Kernel(3, 4.5)
    }
    with pytest.raises(RuntimeError, match="one trace, got 0"):
        read_trace(tmp_path, "opt-in-4096-1")


def request(scale: float) -> dict[str, Kernel]:
    return {name: Kernel(2, scale * ms) for name, ms in MILLISECONDS.items()}


def test_groups_add_up_their_kernels():
    found = {
        (row["group"], row["kernel"]): row
        for row in rows_of_kernels([request(1.0), request(3.0), request(2.0)])
    }
    whole = found[ALL_KERNELS, ""]
    assert (whole["fastest ms"], whole["median ms"], whole["slowest ms"]) == (
        7.5,
        15.0,
        22.5,
    )
    assert found["projections", ""]["median ms"] == 6.0
    assert found["projections", ""]["launches"] == 4
    assert found["projections", "nvjet_b"]["median ms"] == 2.0
    assert found[OTHER, ""]["median ms"] == 1.0
    assert found["mask", ""]["median ms"] == 0.0
    assert sum(row["median ms"] for (_, k), row in found.items() if k) == 15.0


def test_variants_take_turns_and_the_first_trace_is_left_out(monkeypatch, tmp_path):
    log = []

    async def burst(session, url, length, count, salt):
        log.append((url, length, salt))
        return [float(len(log))]

    async def compare_answers(session, servers, lengths):
        log.append(("compared", lengths))

    @contextlib.asynccontextmanager
    async def no_profiling(session, url, name):
        yield

    monkeypatch.setattr(benchmark_prefill_profile, "burst", burst)
    monkeypatch.setattr(benchmark_prefill_profile, "compare_answers", compare_answers)
    monkeypatch.setattr(benchmark_prefill_profile, "profiling", no_profiling)
    monkeypatch.setattr(
        benchmark_prefill_profile, "read_trace", lambda folder, name: {name: Kernel(1)}
    )
    servers = {name: type("Server", (), {"url": name}) for name in ("stock", "opt-in")}
    ttft, kernels = asyncio.run(measure(servers, tmp_path, [3, 2], 2))
    assert log[0] == ("compared", [2, 3])
    asked = log[1:]
    assert len(set(asked)) == len(asked)  # no prompt is served from a prefix cache
    timed = [(url, length) for url, length, salt in asked if salt.startswith("timed")]
    once = [("stock", 3), ("opt-in", 3), ("stock", 2), ("opt-in", 2)]
    assert timed == once * 2
    assert all(len(times) == 2 for times in ttft.values())
    assert kernels[3, "opt-in"] == [{f"opt-in-3-{i}": Kernel(1)} for i in range(2)]


@pytest.fixture
def csv(monkeypatch, tmp_path):
    """What the program writes of two variants, the servers being made up."""

    async def made_up(servers, traces, lengths, repeat):
        assert traces.is_dir()
        scales = {"stock": 3.0, "opt-in": 1.0}
        cells = {(n, v): n / 4096 * scales[v] for n in lengths for v in servers}
        kernels = {cell: [request(scale)] * repeat for cell, scale in cells.items()}
        return {cell: [2 * scale] * repeat for cell, scale in cells.items()}, kernels

    @contextlib.contextmanager
    def running_servers(args, *, extra_args, **lengths):
        assert set(lengths.values()) == {8448, 8192} and args.ranks == 8
        assert "--profiler-config" in extra_args
        yield dict.fromkeys(args.variants)

    monkeypatch.setattr(benchmark_prefill_profile, "measure", made_up)
    monkeypatch.setattr(benchmark_prefill_profile, "running_servers", running_servers)
    file = tmp_path / "profile.csv"
    command = ["benchmarks/benchmark_prefill_profile.py", "--variants", "stock,opt-in"]
    command += ["--shapes", "4096", "8192", "--model", "dsv32-16h", "--ranks", "8"]
    command += ["--csv", str(file), "--plot", str(file.with_suffix(".svg"))]
    monkeypatch.setattr("sys.argv", command)
    benchmark_prefill_profile.main()
    return file


def test_a_table_has_the_ratio_to_stock(csv):
    rows = read_rows([csv])
    lines = profile_totals(rows).splitlines()
    assert lines[0].split("|")[-2].strip() == "stock / opt-in"
    (line,) = (line for line in lines if "8192" in line and ALL_KERNELS in line)
    cells = [cell.strip() for cell in line.split("|")[4:7]]
    assert cells == ["45.0 (45.0 to 45.0)", "15.0 (15.0 to 15.0)", "3.00"]
    assert f"| {FIRST_TOKEN}" in lines[2]

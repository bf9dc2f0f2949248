# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether masked MHA will serve a model: the answers, and the pages that state them."""

import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention import sparse_mla_attention as layer
from vllm.model_executor.layers.attention.sparse_mla_h200 import COSTS
from vllm_sparse_mla.check.launch import resolve_launch
from vllm_sparse_mla.testing.tiny_model import get_spec, make_config

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
DTYPE = {"dtype": "bfloat16"}
DEEPSEEK = make_config(get_spec("dsv32-128h"))
FP8_WEIGHTS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
NVFP4_WEIGHTS = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": [],
}
# The dimensions of the GLM models are the defaults of their configuration classes.
MODELS = {
    "DeepSeek-V3.2": DEEPSEEK | {"quantization_config": FP8_WEIGHTS},
    "DeepSeek-V3.2 NVFP4, FP8 KV scheme": DEEPSEEK
    | {"quantization_config": NVFP4_WEIGHTS},
    "GLM-5": DTYPE
    | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"},
    "GLM-5.3-Flash": DTYPE
    | {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": DTYPE | {"model_type": "glm5_next_text"},
        "vision_config": {"model_type": "glm5_next_vision"},
    },
    "other dimensions": make_config(get_spec("tiny")),
    "no indexer": {
        name: value for name, value in DEEPSEEK.items() if not name.startswith("index_")
    }
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
}

ASK = """
import json, os, sys
from vllm_sparse_mla.check import environment
capability, launches = json.loads(sys.argv[1])
environment.prepare_process(tuple(capability))
from vllm_sparse_mla.check.serving_report import report_serving
answers = []
for *launch, quantized, costs in launches:
    os.environ["VLLM_SPARSE_MLA_QUANTIZED_KV"] = str(int(quantized))
    os.environ["VLLM_SPARSE_MLA_COSTS"] = costs
    answers.append(report_serving(*launch, tuple(capability)).to_dict())
print(json.dumps(answers))
"""


class Launch(NamedTuple):
    gpu: str
    model: str
    tensor_parallel_size: int = 8
    kv_cache_dtype: str = "auto"
    opt_in: bool = False
    quantized: bool = False
    costs: str = ""


class Documented(NamedTuple):
    """A launch and what a page says of it; None where it says nothing."""

    launch: Launch
    verdict: str
    kv_cache: str | None
    backend: str | None


def read_page(name: str) -> list[Documented]:
    text = (ROOT / name).read_text()
    (table,) = re.findall(r"<!-- launches:begin -->\n(.*?)<!-- launches", text, re.S)
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
    ]
    found = []
    for line in lines:
        row = dict(zip(header, line))
        dtype = re.search(r"--kv-cache-dtype (\w+)", row["passed"])
        # A model's name may hold a comma.
        models = [row["model"]] if row["model"] in MODELS else row["model"].split(", ")
        for model in models:
            for size in row.get("tensor parallel size", "8").split(", "):
                launch = Launch(
                    row["GPU"],
                    model,
                    int(size),
                    dtype[1] if dtype else "auto",
                    "VLLM_SPARSE_MLA_SM90=1" in row["passed"],
                    "VLLM_SPARSE_MLA_QUANTIZED_KV=1" in row["passed"],
                )
                found.append(
                    Documented(
                        launch,
                        row["masked MHA"],
                        row.get("KV cache"),
                        row.get("attention backend"),
                    )
                )
    return found


PAGES = {name: read_page(name) for name in ("README.md", "docs/serving.md")}
REFUSED = {
    Launch("sm_100", "DeepSeek-V3.2", 3): "must be divisible by tensor parallel size",
    Launch("sm_100", "DeepSeek-V3.2", 6): "must be divisible by tensor parallel size",
    Launch("sm_100", "DeepSeek-V3.2", 8, "float16"): "incompatible with dtype",
    Launch("sm_100", "DeepSeek-V3.2", 8, "nvfp4"): "not supported with MLA",
    Launch("sm_100", "DeepSeek-V3.2", 8, "turboquant_4bit_nc"): "No valid attention",
    Launch("sm_100", "other dimensions"): "no masked kernel for the model's dimensions",
    Launch("sm_100", "no indexer"): "The model has no sparse MLA.",
}
DECIDED = {
    Launch("sm_100", "DeepSeek-V3.2"): "the model's dtype",
    Launch("sm_100", "GLM-5", 8, "bfloat16"): "--kv-cache-dtype",
    Launch("sm_100", "GLM-5"): "vLLM's configuration of GlmMoeDsaForCausalLM",
    Launch(
        "sm_100", "DeepSeek-V3.2 NVFP4, FP8 KV scheme"
    ): "the checkpoint's quantization_config",
    Launch("sm_90", "GLM-5", 8, "fp8", True): "FLASHMLA_SPARSE's own format for fp8",
}
# An H200's coefficients, as if they were a B200's and of the backend there.
WAYS = COSTS["microseconds"]["192/128"]
COSTS_FILES = {
    "b200.json": {
        "gpu": "NVIDIA B200",
        "multiprocessors": 148,
        "max_splits": 1,
        "one_pass": False,
    }
    | {
        "microseconds": {
            "192/128": WAYS | {"FLASHINFER_MLA_SPARSE": WAYS["FLASHMLA_SPARSE"]}
        }
    },
    "broken.json": {"gpu": "NVIDIA B200"},
}
# By whose measurements, or why not.
ESTIMATED = {
    Launch("sm_100", "DeepSeek-V3.2"): ("", ""),
    Launch("sm_100", "DeepSeek-V3.2", costs="b200.json"): ("NVIDIA B200", ""),
    Launch("sm_100", "DeepSeek-V3.2", 16, costs="b200.json"): ("NVIDIA B200", ""),
    Launch("sm_100", "GLM-5", 8, "bfloat16", costs="b200.json"): (
        "",
        "there are no coefficients of NVIDIA B200 for masked MHA at 256/256",
    ),
    Launch("sm_100", "DeepSeek-V3.2", costs="broken.json"): ("", "multiprocessors: "),
    Launch("sm_100", "DeepSeek-V3.2", costs="none.json"): ("", "cannot be read"),
    Launch("sm_90", "DeepSeek-V3.2", 8, "auto", True): ("NVIDIA H200", ""),
    Launch("sm_90", "DeepSeek-V3.2", 8, "auto", True, costs="none.json"): (
        "",
        "cannot be read",
    ),
    Launch("sm_90", "GLM-5.3-Flash", 8, "auto", True): (
        "",
        "no coefficients of NVIDIA H200 for FLASHINFER_MLA_SPARSE_SM90",
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[Launch, dict]:
    """Reports by launch; one process asks for each GPU, with and without the opt-in."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    launches = {row.launch for page in PAGES.values() for row in page}
    launches |= REFUSED.keys() | DECIDED.keys() | ESTIMATED.keys()
    for name, costs in COSTS_FILES.items():
        (folder / name).write_text(json.dumps(costs))
    groups = defaultdict(list)
    for launch in sorted(launches):
        for opt_in in {launch.opt_in, launch.gpu == "sm_90"}:
            groups[launch.gpu, opt_in].append(launch._replace(opt_in=opt_in))

    def ask(key: tuple[str, bool]) -> list[dict]:
        gpu, opt_in = key
        capability = divmod(int(gpu.removeprefix("sm_")), 10)
        asked = [
            (
                *(str(folder / x.model), *x[2:4], x.quantized),
                x.costs and str(folder / x.costs),
            )
            for x in groups[key]
        ]
        done = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps([capability, asked])],
            capture_output=True,
            text=True,
            env=os.environ | {"VLLM_SPARSE_MLA_SM90": str(int(opt_in))},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(max_workers=2) as pool:
        reports = pool.map(ask, groups)
        return dict(zip(chain(*groups.values()), chain.from_iterable(reports)))


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_check_answers(page, answers):
    assert PAGES[page]
    for launch, verdict, kv_cache, backend in PAGES[page]:
        report = answers[launch]
        resolved = report["launch"]
        said = (kv_cache or resolved["kv_cache_dtype"], backend or resolved["backend"])
        assert said == (resolved["kv_cache_dtype"], resolved["backend"]), launch
        with_opt_in = answers.get(launch._replace(opt_in=True), report)
        if verdict.startswith("yes"):
            assert report["used"], launch
            continue
        assert not report["used"], launch
        if verdict == "with the opt-in":
            assert report["reasons"] == [
                "The GPU is SM90, where masked MHA is used only with "
                "VLLM_SPARSE_MLA_SM90=1."
            ]
            assert with_opt_in["used"], launch
            continue
        # The opt-in removes a reason that the page does not name.
        assert len(with_opt_in["reasons"]) == 1, (launch, with_opt_in["reasons"])
        named = {
            "no: no row": "admit no prompt length",
            "no: quantized": "is quantized, and where that pays was not measured",
        }
        expected = named.get(verdict, verdict.removeprefix("no: "))
        assert expected in with_opt_in["reasons"][0], launch


def test_what_the_readme_passes_is_needed(answers):
    assert PAGES["README.md"]
    for launch, verdict, *_ in PAGES["README.md"]:
        default = Launch(launch.gpu, launch.model)
        assert default in answers
        assert answers[default]["used"] == (verdict == "yes" and launch == default)


@pytest.mark.parametrize(
    "launch", DECIDED, ids=lambda launch: "-".join(map(str, launch))
)
def test_says_what_decided_on_the_dtype(launch, answers):
    assert answers[launch]["launch"]["decided_by"] == DECIDED[launch]


@pytest.mark.parametrize(
    "launch", ESTIMATED, ids=lambda launch: "-".join(map(str, launch))
)
def test_says_by_whose_measurements_it_is_estimated(launch, answers):
    report, table = answers[launch], answers[launch._replace(costs="")]
    gpu, refusal = ESTIMATED[launch]
    assert report["estimated_by"] == gpu
    assert refusal in report["no_estimate"]
    assert bool(report["no_estimate"]) is bool(refusal)
    lengths = [
        [r[name] for name in ("whole_prompts", "with_context")] for r in (report, table)
    ]
    if launch.gpu == "sm_100":
        assert (lengths[0] == lengths[1]) is not bool(gpu)
        assert report["used"]
    else:
        assert report["used"] is bool(gpu)


@pytest.mark.parametrize(
    "launch", REFUSED, ids=lambda launch: "-".join(map(str, launch))
)
def test_each_reason_against_it_is_one_line(launch, answers):
    report = answers[launch]
    (reason,) = report["reasons"]
    assert REFUSED[launch] in reason
    assert "\n" not in reason and len(reason) < 300 and reason.endswith((".", "]"))


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4, 8])
def test_ranges_are_those_of_vllms_dispatch(tensor_parallel_size, answers):
    report = answers[Launch("sm_100", "DeepSeek-V3.2", tensor_parallel_size)]

    def dispatched(query_len: int, seq_len: int, has_context: bool) -> bool:
        return mla_attention._use_masked_mha(
            backend_name=report["launch"]["backend"],
            tensor_parallel_size=tensor_parallel_size,
            qk_head_dim=192,
            v_head_dim=128,
            query_len=query_len,
            seq_len=seq_len,
            has_context=has_context,
        )

    for n in (2049, 4095, 4096, 4097, 8192, 8193, 16384, 16385, 32768, 32769):
        admitted = any(r["first"] <= n <= r["last"] for r in report["whole_prompts"])
        assert admitted == dispatched(n, n, False)
        for query_len in (511, 512, 1023, 1024, 1536, 2048, 4096, 16384):
            admitted = any(
                r["first"] <= n <= r["last"] and query_len >= r["min_query_len"]
                for r in report["with_context"]
            )
            assert admitted == dispatched(query_len, n, True)


def test_longest_sequences_fill_the_workspace(answers):
    report = answers[Launch("sm_100", "DeepSeek-V3.2")]
    words = report["workspace_bytes"] // 4
    for row in report["workspace"]:
        for batch_size, longest in row["longest_sequence"].items():
            fits, exceeds = (
                math.prod(layer._topk_mask_shape(int(batch_size), row["query_len"], n))
                for n in (longest, longest + 1)
            )
            assert fits <= words < exceeds


@pytest.mark.parametrize(
    "content", [None, "{", "[]", b"\xff"], ids=["none", "broken", "list", "binary"]
)
def test_an_unreadable_config_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="--model"):
        resolve_launch(str(path), 1, "auto")

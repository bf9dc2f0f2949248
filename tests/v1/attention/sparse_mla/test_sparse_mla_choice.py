# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which way a step's prefills take: by an estimate where there is one, else as in vLLM.

Under the Hopper opt-in coefficients of an H200 decide; those of a file on the GPU on
which they were measured, and there alone. The device is faked.
"""

import copy
import json

import pytest

from vllm.model_executor.layers.attention import mla_attention

try:
    from vllm.model_executor.layers.attention import sparse_mla_choice
    from vllm.model_executor.layers.attention.sparse_mla_estimate import (
        MASKED_MHA,
        PrefillEstimate,
        last_parts,
        make_estimate,
        whole_prompts,
    )
    from vllm.model_executor.layers.attention.sparse_mla_h200 import COSTS
    from vllm.model_executor.layers.attention.sparse_mla_warmup import (
        masked_mha_query_lens,
        prepare_masked_mha,
    )
except ImportError:  # stock: every test here fails, as marked
    sparse_mla_choice = None

from vllm_sparse_mla.testing import served
from vllm_sparse_mla.testing.served import step_metadata

pytestmark = pytest.mark.stock_fails("stock estimates nothing")

FILE = "VLLM_SPARSE_MLA_COSTS"
B200 = ("NVIDIA B200", 148)
H200 = ("NVIDIA H200", 132)


@pytest.fixture(autouse=True)
def no_file(monkeypatch):
    monkeypatch.delenv(FILE, raising=False)


@pytest.fixture
def said(monkeypatch):
    """What was logged as a warning."""
    lines = []
    monkeypatch.setattr(
        sparse_mla_choice.logger,
        "warning_once",
        lambda msg, *args: lines.append(msg % args),
    )
    return lines


@pytest.fixture
def table_admits(monkeypatch):
    """Makes vLLM's table of lengths answer so."""

    def answer(admitted: bool) -> None:
        monkeypatch.setattr(mla_attention, "_use_masked_mha", lambda **_: admitted)

    return answer


@pytest.fixture
def long_batch():
    """One new prompt beside continuations over a long context."""
    return step_metadata([16, 16, 4096], [14000, 14000, 0])


def make_layer(**options):
    (layer,) = served.layers_of(served.server_config(**options))
    return layer


@pytest.mark.parametrize("backend", ["FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"])
@pytest.mark.parametrize("model", ["deepseek", "glm"])
@pytest.mark.parametrize("size", [1, 2, 8, 16])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([2500], [0]),
        ([16384], [0]),
        ([4096], [4096]),
        ([4096], [60000]),
        ([16] * 30 + [4096], [14000] * 30 + [0]),
        ([256] * 16, [8192] * 16),
    ],
    ids=["short", "long", "chunk", "late-chunk", "continuations", "suffixes"],
)
def test_the_shorter_estimate_decides(
    on_device, model, backend, size, query_lens, context_lens
):
    on_device("sm90", "1")
    layer = make_layer(model=model, backend=backend, tensor_parallel_size=size)
    dims = (layer.impl.qk_head_dim, layer.impl.v_head_dim)
    heads = layer.impl.num_heads
    estimate = make_estimate(COSTS, *dims, backend, "auto", heads, 2048)
    masked, sparse = estimate.microseconds(
        query_lens, context_lens, int(any(context_lens))
    )
    taken = layer._use_sparse_mha(step_metadata(query_lens, context_lens))
    assert taken is (masked < sparse)


def test_batches_of_one_length_go_both_ways(on_device, long_batch):
    """The longest query and the longest sequence, by which vLLM decides, are alike."""
    on_device("sm90", "1")
    layer = make_layer(backend="FLASH_ATTN_MLA_SPARSE")
    assert layer._use_sparse_mha(long_batch)
    many = step_metadata([16] * 16 + [4096], [14000] * 16 + [0])
    assert not layer._use_sparse_mha(many)


@pytest.mark.parametrize("topk", [512, 1024])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_other_topks_and_sizes_get_an_answer(on_device, topk, size):
    on_device("sm90", "1")
    layer = make_layer(backend="FLASH_ATTN_MLA_SPARSE", tensor_parallel_size=size)
    answers = {
        layer._use_sparse_mha(step_metadata([n], [0], topk)) for n in (2500, 500_000)
    }
    assert answers == {True, False}


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each estimate of a step."""
    lens, ask = [], PrefillEstimate.microseconds
    monkeypatch.setattr(
        PrefillEstimate,
        "microseconds",
        lambda self, *args: lens.append(args) or ask(self, *args),
    )
    return lens


@pytest.mark.parametrize(
    ("query_len", "context_len", "kv_cache_dtype", "num_chunks"),
    [
        pytest.param(4096, 8192, "auto", 0, id="one-pass"),
        pytest.param(16, 14000, "auto", 1, id="better-split"),
        pytest.param(4096, 65000, "auto", 1, id="too-long"),
        pytest.param(4096, 8192, "fp8_ds_mla", 1, id="quantized"),
    ],
)
def test_contexts_taken_with_new_tokens_are_no_chunk(
    on_device, asked, query_len, context_len, kv_cache_dtype, num_chunks
):
    on_device("sm90", "1", gpu=H200)
    layer = make_layer()
    layer.impl.kv_cache_dtype = kv_cache_dtype
    layer._use_sparse_mha(step_metadata([query_len], [context_len]))
    ((*_, chunks),) = asked
    assert chunks == num_chunks


def test_a_step_is_estimated_once(on_device, asked, long_batch):
    on_device("sm90", "1")
    layers = [make_layer(backend="FLASH_ATTN_MLA_SPARSE") for _ in range(3)]
    assert all(layer._use_sparse_mha(long_batch) for layer in layers)
    assert len(asked) == 1
    # Another backend's is another question.
    make_layer(backend="FLASHMLA_SPARSE")._use_sparse_mha(long_batch)
    assert len(asked) == 2


@pytest.mark.parametrize("switch", ["1", None])
def test_elsewhere_vllms_table_decides(on_device, table_admits, said, switch):
    on_device("sm100", switch)
    layer = make_layer(tensor_parallel_size=1)
    for admitted in (True, False):
        table_admits(admitted)
        assert layer._use_sparse_mha(step_metadata([4096], [0])) is admitted
    assert not said


@pytest.mark.parametrize(
    "backend", ["FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE"]
)
def test_what_was_not_measured_stays_with_sparse_mqa(
    on_device, table_admits, said, backend
):
    on_device("sm90", "1")
    table_admits(True)
    layer = make_layer(backend=backend)
    for _ in range(2):
        assert not layer._use_sparse_mha(step_metadata([4096], [0]))
    (line,) = said
    assert "no coefficients of NVIDIA H200" in line and backend in line


def test_at_start_a_line_says_that_the_switch_has_no_effect(
    on_device, said, monkeypatch
):
    """GLM-5.3-Flash in vLLM's first choice of a backend on SM90."""
    on_device("sm90", "1")
    backend = "FLASHINFER_MLA_SPARSE_SM90"
    config = served.server_config(model="glm-flash", num_layers=3, backend=backend)
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
    assert not any(prepare_masked_mha(x.impl) for x in served.layers_of(config))
    (line,) = said
    assert "VLLM_SPARSE_MLA_SM90 has no effect on prefills" in line
    assert f"{backend} at 256/256" in line


@pytest.mark.parametrize("admitted", [True, False])
@pytest.mark.parametrize("name", ["sm90", "sm100"])
def test_lengths_that_make_no_sense_are_left_to_vllm(
    on_device, table_admits, said, costs_file, name, admitted
):
    on_device(name, "1", gpu=B200)
    costs_file()
    table_admits(admitted)
    taken = make_layer()._use_sparse_mha(step_metadata([4096], [-4]))
    assert taken is (admitted and name == "sm100")
    assert len(said) == 1 and "negative lengths" in said[0]


@pytest.fixture
def costs_file(monkeypatch, tmp_path):
    """Writes and names a file: coefficients of a B200 that are an H200's, changed."""

    def write(change=None, text: str | None = None) -> None:
        costs = copy.deepcopy(COSTS) | {"gpu": B200[0], "multiprocessors": B200[1]}
        if change is not None:
            change(costs)
        path = tmp_path / "costs.json"
        path.write_text(json.dumps(costs) if text is None else text)
        monkeypatch.setenv(FILE, str(path))

    return write


def scale_masked_mha(factor: float):
    """A change of the file: masked MHA takes so many times as long."""

    def change(costs):
        for ways in costs["microseconds"].values():
            for coefficients in ways[MASKED_MHA].values():
                for term in coefficients:
                    coefficients[term] *= factor

    return change


@pytest.mark.parametrize("admitted", [True, False])
@pytest.mark.parametrize(("factor", "pays"), [(0.01, True), (100, False)])
@pytest.mark.parametrize(("name", "switch"), [("sm90", "1"), ("sm100", None)])
def test_a_file_measured_here_decides(
    on_device, table_admits, costs_file, said, name, switch, factor, pays, admitted
):
    on_device(name, switch, gpu=B200)
    costs_file(scale_masked_mha(factor))
    table_admits(admitted)
    for options in ({}, dict(model="glm", tensor_parallel_size=1)):
        layer = make_layer(**options)
        for lens in (([4096], [0]), ([600, 4096], [5000, 0])):
            assert layer._use_sparse_mha(step_metadata(*lens)) is pays
    assert not said


def test_the_room_for_masks_is_asked_for_under_a_file_too(on_device, costs_file):
    on_device("sm100", gpu=B200)
    costs_file(scale_masked_mha(0.01))
    metadata = step_metadata([4096], [0], mask_words=4)
    assert not make_layer()._use_sparse_mha(metadata)


def test_backends_that_share_a_kernel_share_its_coefficients(on_device, costs_file):
    def rename(costs):
        ways = costs["microseconds"]["192/128"]
        ways["FLASHINFER_MLA_SPARSE"] = ways.pop("FLASHMLA_SPARSE")

    on_device("sm100", gpu=B200)
    costs_file(rename)
    layer = make_layer(backend="FLASH_ATTN_MLA_SPARSE_FA4")
    assert layer._use_sparse_mha(step_metadata([4096], [0]))


def without_dims(costs):
    del costs["microseconds"]["192/128"]


def without_term(costs):
    del costs["microseconds"]["192/128"]["FLASHMLA_SPARSE"]["auto"]["launches"]


def with_text(costs):
    costs["microseconds"]["192/128"][MASKED_MHA]["auto"]["chunks"] = "many"


def negative(costs):
    costs["microseconds"]["192/128"][MASKED_MHA]["auto"]["chunks"] = -1.0


UNUSABLE = {
    "another-gpu": (lambda costs: costs.update(gpu="NVIDIA B300"), "NVIDIA B300"),
    "partitioned": (lambda costs: costs.update(multiprocessors=74), "with 74"),
    "no-dimensions": (without_dims, "no coefficients of NVIDIA B200 for masked MHA"),
    "no-term": (without_term, "coefficients for FLASHMLA_SPARSE must be those of"),
    "text": (with_text, "chunks: Input should be a valid number"),
    "negative": (negative, "chunks: Input should be greater than or equal to 0"),
    "no-name": (lambda costs: costs.pop("gpu"), "gpu: Field required"),
    "no-table": (lambda costs: costs.update(microseconds=3), "microseconds: Input"),
}
UNREADABLE = {
    "empty": ("", "EOF while parsing"),
    "no-json": ("{,", "Invalid JSON"),
    "a-list": ("[]", "Input should be an object"),
    "not-a-number": ('{"gpu": "x", "multiprocessors": NaN}', "must hold what"),
}


@pytest.mark.parametrize(("name", "switch"), [("sm90", "1"), ("sm100", None)])
@pytest.mark.parametrize("case", [*UNUSABLE, *UNREADABLE, "missing", "a-folder"])
def test_a_file_of_no_use_leaves_dispatch_to_vllm(
    on_device, table_admits, costs_file, said, monkeypatch, tmp_path, name, switch, case
):
    on_device(name, switch, gpu=B200)
    if case in UNUSABLE:
        change, reason = UNUSABLE[case]
        costs_file(change)
    elif case in UNREADABLE:
        text, reason = UNREADABLE[case]
        costs_file(text=text)
    else:
        path = tmp_path if case == "a-folder" else tmp_path / "none.json"
        monkeypatch.setenv(FILE, str(path))
        reason = f"{path} cannot be read"
    layers = [make_layer() for _ in range(2)]
    for admitted in (True, False):
        table_admits(admitted)
        for layer in layers:
            taken = layer._use_sparse_mha(step_metadata([4096], [0]))
            assert taken is (admitted and name == "sm100")
    (line,) = said
    what = {"sm90": "no effect on prefills", "sm100": "dispatched as in vLLM"}[name]
    assert reason in line and "\n" not in line and what in line


def test_warm_up_covers_what_a_file_lets_through(on_device, table_admits, costs_file):
    """Lengths of which vLLM's table admits none, those just above the top-k too."""
    on_device("sm100", gpu=B200)
    table_admits(False)

    def short_prompts_alone(costs):
        ways = costs["microseconds"]["192/128"]
        for kernel in (MASKED_MHA, "FLASHMLA_SPARSE"):
            for term in ways[kernel]["auto"]:
                ways[kernel]["auto"][term] = 0.0
        # 2560 tokens are 210 blocks of each of 16 heads, and one more are 231.
        ways[MASKED_MHA]["auto"]["suffix blocks"] = B200[1] / 16
        ways["FLASHMLA_SPARSE"]["auto"]["tokens x head tiles"] = 211 / 2560

    costs_file(short_prompts_alone)
    config = served.server_config(max_num_batched_tokens=8192)
    (layer,) = served.layers_of(config)
    assert layer._use_sparse_mha(step_metadata([2560], [0]))
    assert not layer._use_sparse_mha(step_metadata([2561], [0]))
    assert masked_mha_query_lens(layer, config, has_context=False) == [8192]


def test_a_log_line_names_the_lengths(on_device):
    on_device("sm90", "1")
    estimate = make_estimate(COSTS, 192, 128, "FLASH_ATTN_MLA_SPARSE", "auto", 16, 2048)
    line = sparse_mla_choice.describe_estimate(estimate, 163840)
    ((first, last),) = whole_prompts(estimate, 163840)
    assert f"whole prompts of {first} to {last} tokens" in line
    (few, most), *_ = last_parts(estimate, 8192)
    assert f"the last {few} to {most} of 8192 tokens" in line
    assert "NVIDIA H200, with 16 heads and a top-k of 2048" in line
    # A server's longest sequence bounds what is said.
    line = sparse_mla_choice.describe_estimate(estimate, 4096)
    assert "2049 to 4096 tokens" in line and "8192" not in line

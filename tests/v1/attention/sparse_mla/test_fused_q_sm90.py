# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Under the Hopper opt-in ``fused_q`` runs vLLM's CuTe DSL kernel on SM90 as well.

Who gets it and what it compiles are asked of a faked device; whether it gives the bits
of the Triton kernel that SM90 has without the opt-in, of a real one.
"""

import importlib
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm
from vllm.models.deepseek_v32.common import kernels

try:
    from vllm.models.deepseek_v32.nvidia.ops import fused_q_sm90
except ImportError:  # stock: every test here fails, as marked
    fused_q_sm90 = None

pytestmark = pytest.mark.stock_fails("stock has no such kernel on SM90")

SWITCH = "VLLM_SPARSE_MLA_SM90"
MODULE = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
TOKENS = (1, 2, 3, 63, 64, 65, 127, 1000, 4096, 8192, 16384)
NUM_HEADS = (8, 16, 32, 64, 128)
ROPE_DIM, NOPE_DIM, INDEX_DIM = 64, 512, 128
MAX_POSITION = 4096
POISON = 0xA5


@dataclass(frozen=True)
class Indexer:
    """A model's indexer: heads of its queries and their RoPE layout."""

    num_heads: int
    interleaved: bool


DEEPSEEK, GLM = Indexer(64, interleaved=False), Indexer(32, interleaved=True)
INDEXERS = {
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "interleaved-64": Indexer(64, interleaved=True),
    "none": None,
}
indexers = pytest.mark.parametrize("indexer", INDEXERS.values(), ids=INDEXERS)
queries = pytest.mark.parametrize("quantize", [False, True], ids=["bf16", "fp8"])


@pytest.fixture(autouse=True, scope="module")
def edited():
    """Edits the module, whether this process has the opt-in or not."""
    from vllm_sparse_mla import overlay

    path = Path(vllm.__file__).parents[1] / f"{MODULE.replace('.', '/')}.py"
    loader = overlay._EditingLoader(MODULE, path)
    module = module_from_spec(spec_from_file_location(MODULE, loader=loader))
    loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MODULE, module)
        yield


@pytest.fixture
def cutedsl():
    return importlib.import_module(MODULE)


@pytest.fixture
def opt_in(monkeypatch):
    """Returns a function that switches the opt-in on or off, or as good as unset."""
    monkeypatch.setitem(
        vllm.envs.environment_variables, SWITCH, lambda: switched == ["1"]
    )
    switched = []

    def switch(value: str | None) -> None:
        switched[:] = [value]

    return switch


def inputs(
    tokens: int,
    num_heads: int,
    indexer: Indexer | None,
    quantize: bool,
    device: str = "cpu",
    scale: float = 1.0,
    rope_dtype: torch.dtype = torch.bfloat16,
) -> dict:
    """Arguments of ``fused_q``, with the strides that a layer gives them."""
    rng = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, device=device, generator=rng) * scale
        return values.to(torch.bfloat16)

    def rope_cache() -> torch.Tensor:
        angles = torch.randn(MAX_POSITION, 32, device=device, generator=rng)
        return torch.cat((angles.cos(), angles.sin()), dim=1).to(rope_dtype)

    q = normal(tokens, num_heads, 128 + ROPE_DIM)
    nope = normal(num_heads, tokens, NOPE_DIM).transpose(0, 1)
    index_heads = indexer.num_heads if indexer else 0
    return dict(
        positions=torch.randint(
            MAX_POSITION, (tokens,), device=device, generator=rng, dtype=torch.int64
        ),
        q_pe=q[..., 128:],
        q_pe_cos_sin_cache=rope_cache(),
        index_q=normal(tokens, index_heads, INDEX_DIM) if indexer else None,
        index_q_cos_sin_cache=rope_cache() if indexer else None,
        # Columns of ``q`` would have it rotated in place: once, not by both kernels.
        ql_nope=nope,
        q_scale=torch.ones(1, device=device),
        index_weights=normal(tokens, 128 + index_heads)[:, 128:] if indexer else None,
        index_weights_softmax_scale=INDEX_DIM**-0.5,
        index_weights_head_scale=index_heads**-0.5 if indexer else 0.0,
        has_indexer=indexer is not None,
        index_rope_interleave=indexer.interleaved if indexer else False,
        quantize_mqa=quantize,
    )


class FakeDevice:
    """A device of some capability, on which no kernel runs.

    Attributes:
        launched: which kernel each call would have launched.
        compiled: arguments of each compilation that the CuTe DSL was asked for.
    """

    def __init__(self, monkeypatch, cutedsl, capability: int):
        self.launched, self.compiled = [], []
        platform = SimpleNamespace(
            is_cuda=lambda: True,
            is_arch_support_pdl=lambda: True,
            has_device_capability=lambda least: capability >= least,
        )
        monkeypatch.setattr(kernels, "current_platform", platform)
        monkeypatch.setattr(kernels, "_fused_q_kernel", self)
        for module in (cutedsl, fused_q_sm90):
            monkeypatch.setattr(module, "current_platform", platform)
        monkeypatch.setattr(cutedsl.FusedQKernel, "compile", self._compile)

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launched.append("triton")

    def _compile(self, *args):
        self.compiled.append(args)
        return lambda *args: self.launched.append("cutedsl")


@pytest.fixture
def fake_device(monkeypatch, cutedsl):
    return lambda capability: FakeDevice(monkeypatch, cutedsl, capability)


@pytest.mark.parametrize(
    ("capability", "switch", "expected"),
    [
        pytest.param(90, "1", "cutedsl", id="opted-in"),
        pytest.param(90, None, "triton", id="unset"),
        pytest.param(90, "0", "triton", id="off"),
        pytest.param(80, "1", "triton", id="sm80"),
        pytest.param(89, "1", "triton", id="sm89"),
        pytest.param(100, None, "cutedsl", id="sm100"),
        pytest.param(100, "1", "cutedsl", id="sm100-opted-in"),
        pytest.param(120, None, "cutedsl", id="sm120"),
    ],
)
def test_only_the_opt_in_on_sm90_changes_the_kernel(
    opt_in, fake_device, capability, switch, expected
):
    opt_in(switch)
    device = fake_device(capability)
    kernels.fused_q(**inputs(3, 8, DEEPSEEK, quantize=False))
    assert device.launched == [expected]


def unsupported() -> list:
    """What upstream's kernel does not take, by name."""
    good = inputs(3, 8, DEEPSEEK, quantize=True)
    changes = {
        "float16": dict(q_pe=good["q_pe"].half()),
        "rope-128": dict(q_pe=torch.cat([good["q_pe"]] * 2, dim=-1)),
        "6-heads": {key: good[key][:, :6] for key in ("q_pe", "ql_nope")},
        "nope-256": dict(ql_nope=good["ql_nope"][..., :256]),
        "index-float16": dict(index_q=good["index_q"].half()),
        "8-index-heads": dict(index_q=good["index_q"][:, :8]),
        "index-64": dict(index_q=good["index_q"][..., :64]),
    }
    return [pytest.param(good | change, id=name) for name, change in changes.items()]


@pytest.mark.parametrize("arguments", unsupported())
def test_what_sm100_does_not_take_neither_does_sm90(
    opt_in, fake_device, cutedsl, arguments
):
    opt_in("1")
    fake_device(90)
    asked = {key: arguments[key] for key in ("has_indexer", "quantize_mqa")}
    tensors = [arguments[key] for key in ("q_pe", "index_q", "ql_nope")]
    assert not cutedsl.is_fused_q_cutedsl_supported(*tensors, **asked)


@indexers
@queries
def test_no_number_of_tokens_compiles_another_kernel(
    opt_in, fake_device, indexer, quantize
):
    """So the step that vLLM profiles at start-up compiles what serving calls.

    Nothing else in the key differs between calls of a layer: whether it has an indexer
    does not, and no backend of SM90 quantizes queries.
    """
    opt_in("1")
    device = fake_device(90)
    for tokens in (1, 2, 127, 300):
        kernels.fused_q(**inputs(tokens, 16, indexer, quantize))
    assert device.launched == ["cutedsl"] * 4
    assert len(set(device.compiled)) == 1


@pytest.mark.parametrize(
    ("num_heads", "index_heads", "nope_dim", "heads_a_warp", "num_warps"),
    [
        pytest.param(128, 64, 0, 4, 8, id="deepseek"),
        pytest.param(16, 64, 0, 4, 4, id="deepseek-tp8"),
        pytest.param(8, 64, 0, 1, 8, id="deepseek-tp16"),
        pytest.param(64, 32, 0, 4, 8, id="glm"),
        pytest.param(8, 32, 0, 1, 8, id="glm-tp8"),
        pytest.param(12, 64, 0, 1, 4, id="12-heads"),
        pytest.param(128, 0, 0, 4, 8, id="no-indexer"),
        pytest.param(128, 64, NOPE_DIM, 1, 8, id="fp8"),
        pytest.param(16, 0, NOPE_DIM, 1, 8, id="fp8-no-indexer"),
    ],
)
def test_sm90_gets_larger_blocks(
    fake_device, cutedsl, num_heads, index_heads, nope_dim, heads_a_warp, num_warps
):
    index_dim = INDEX_DIM if index_heads else 0
    dims = (ROPE_DIM, nope_dim, num_heads, index_dim, index_heads, False)
    stock = cutedsl.FusedQKernel
    fake_device(90)
    kernel = fused_q_sm90.for_this_device(stock)(*dims)
    # By this a profiler shows the kernel.
    assert repr(kernel).startswith(f"<{fused_q_sm90.__name__}.FusedQKernelSM90 ")
    assert (kernel.heads_a_warp, kernel.num_warps) == (heads_a_warp, num_warps)
    assert kernel.num_ctas_per_tok * num_warps * heads_a_warp == num_heads
    assert kernel.num_ctas_per_idx_tok * num_warps * 4 == index_heads
    for capability in (100, 103, 120):
        fake_device(capability)
        assert fused_q_sm90.for_this_device(stock) is stock


class Poisoned:
    """``torch``, but what ``empty`` returns is full of poison, and so is a row below.

    Attributes:
        whole: all that was allocated, with the row below.
    """

    def __init__(self):
        self.whole = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, dtype: torch.dtype, device: torch.device):
        rows, *others = torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)
        found = torch.empty(rows + 1, *others, dtype=dtype, device=device)
        found.view(torch.uint8).fill_(POISON)
        self.whole.append(found)
        return found[:rows]

    def empty_like(self, x: torch.Tensor, dtype: torch.dtype | None = None):
        return self.empty(*x.shape, dtype=dtype or x.dtype, device=x.device)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture
def both_kernels(opt_in, monkeypatch):
    """Returns a function: the outputs of the Triton and of the CuTe DSL kernel."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("elsewhere the opt-in changes nothing")

    def run(arguments: dict) -> list[list[torch.Tensor]]:
        results = []
        for switch in ("0", "1"):
            opt_in(switch)
            poisoned = Poisoned()
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "torch", poisoned)
                index_q, index_weights, mqa_q = kernels.fused_q(**arguments)
            for whole in poisoned.whole:
                assert (whole[-1:].view(torch.uint8) == POISON).all()
            outputs = [mqa_q]
            if arguments["has_indexer"]:
                outputs += [index_q, index_weights]
            results.append(outputs)
        return results

    return run


def compare(triton, cutedsl, indexer: Indexer | None) -> None:
    """Bits of both kernels' outputs.

    Weights are multiplied by both scales in turn, or by their product: the same where
    one of them is a power of two, as with 64 heads.
    """
    assert torch.equal(bits(triton[0]), bits(cutedsl[0]))
    if indexer:
        assert torch.equal(bits(triton[1]), bits(cutedsl[1]))
        tolerance = 0.0 if indexer.num_heads == 64 else 2**-21
        torch.testing.assert_close(cutedsl[2], triton[2], rtol=tolerance, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", NUM_HEADS)
@indexers
@queries
def test_both_kernels_give_the_same_bits(both_kernels, num_heads, indexer, quantize):
    for tokens in TOKENS:
        arguments = inputs(tokens, num_heads, indexer, quantize, "cuda")
        compare(*both_kernels(arguments), indexer)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, 2**-30, 2**-8, 2**10], ids=str)
@indexers
@queries
def test_the_same_bits_for_values_that_are_small_or_large(
    both_kernels, scale, indexer, quantize
):
    arguments = inputs(1000, 16, indexer, quantize, "cuda", scale=scale)
    compare(*both_kernels(arguments), indexer)


@pytest.mark.gpu
@indexers
@queries
def test_a_float32_rope_cache_is_rounded_alike(both_kernels, indexer, quantize):
    """Its products are not exact in float32, so the order of operations shows."""
    arguments = inputs(1000, 16, indexer, quantize, "cuda", rope_dtype=torch.float32)
    for triton, cutedsl in zip(*both_kernels(arguments), strict=True):
        # One step of FP8 where that is the type, else of BF16.
        step = 2**-3 if triton.dtype.itemsize == 1 else 2**-7
        torch.testing.assert_close(
            cutedsl.float(), triton.float(), rtol=step, atol=2**-9
        )


@pytest.mark.gpu
@pytest.mark.parametrize("output", range(3), ids=["query", "index-query", "weights"])
def test_one_other_input_value_is_seen(both_kernels, output):
    """Negative control: each output is compared, down to one element."""
    arguments = inputs(64, 16, DEEPSEEK, False, "cuda")
    triton, _ = both_kernels(arguments)
    changed = arguments[("q_pe", "index_q", "index_weights")[output]]
    changed[63, 15, ...].neg_()
    _, cutedsl = both_kernels(arguments)
    with pytest.raises(AssertionError):
        compare(triton, cutedsl, DEEPSEEK)
    assert not torch.equal(bits(triton[output]), bits(cutedsl[output]))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles each variant once per session, whatever the number of xdist workers."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from vllm_sparse_mla.codegen import (
    HEAD_DIMS,
    CodegenRecord,
    DisassemblerMissing,
    Variant,
    compile_variants,
    disassembly,
)
from vllm_sparse_mla.codegen.worker import environment

CALLBACKS = {
    "dense": ("dense", False),
    "offset": ("offset", False),
    "offset-key-starts": ("offset", True),
}
BASELINES = ("word32", "stock_dense", "stock_offset")
CELLS = {
    f"{dim}-{name}": Variant(dim, dim_v, causal, lse)
    for dim, dim_v in HEAD_DIMS
    for name, causal, lse in (
        ("causal-nolse", True, False),  # pure prefill
        ("causal-lse", True, True),  # suffix
        ("full-lse", False, True),  # context chunk
    )
}
# The 256/256 kernel is another one for several requests.
CELLS["256-full-lse-b2"] = Variant(256, 256, batch=2)
CELLS["256-causal-lse-b2"] = Variant(256, 256, causal=True, batch=2)


OURS = {
    f"{cell}-{name}": replace(CELLS[cell], callback=callback, key_starts=starts)
    for cell in CELLS
    for name, (callback, starts) in CALLBACKS.items()
}
WITH_KEY_STARTS = {name: v for name, v in OURS.items() if v.key_starts}
# The calls of the 192/128 kernel that apply a diagonal, each beside upstream's kernel.
DIAGONAL = {
    f"192-causal-{'lse' if lse else 'nolse'}-{requests}{name}": Variant(
        causal=True, lse=lse, batch=batch, callback=callback, key_starts=starts
    )
    for lse in (True, False)
    for batch, requests in ((1, ""), (2, "b2-"))
    for name, (callback, starts) in (
        *CALLBACKS.items(),
        *((name, (name, False)) for name in BASELINES),
    )
}
# Kernels without key blocks that get both.
UNAFFECTED = {
    "192-causal-unmasked": Variant(causal=True),
    "192-causal-nolse": Variant(causal=True, lse=False),
    "192-full-dense": Variant(callback="dense"),
    "192-full-offset": Variant(callback="offset"),
    **{
        f"256-causal-{callback}": Variant(256, 256, causal=True, callback=callback)
        for callback in ("none", "dense", "offset")
    },
}
WORDS = {
    f"{dim}-{'causal' if causal else 'full'}": Variant(
        dim, dim_v, causal, callback="word32"
    )
    for dim, dim_v in HEAD_DIMS
    for causal in (False, True)
}
ALONE = [
    *(Variant(callback=c, key_starts=k, alone=True) for c, k in CALLBACKS.values()),
    *(Variant(callback=c, alone=True) for c in BASELINES),
]
# The 192/128 kernel is the same for any number of requests.
THREE_REQUESTS = {
    "192-full-dense": Variant(batch=3, callback="dense"),
    "192-causal-offset-key-starts": Variant(
        causal=True, batch=3, callback="offset", key_starts=True
    ),
}
SLICED = replace(THREE_REQUESTS["192-full-dense"], sliced=True)


def stock_twin(variant: Variant) -> Variant:
    """The same kernel with the stock callback of the same kind."""
    return replace(variant, callback=f"stock_{variant.callback}", key_starts=False)


@pytest.fixture(name="stock_twin", scope="session")
def stock_twin_fixture() -> Callable[[Variant], Variant]:
    return stock_twin


def variants() -> list[Variant]:
    """What the tests compare."""
    ours = OURS.values()
    beside_upstreams = [*DIAGONAL.values(), *UNAFFECTED.values()]
    three = THREE_REQUESTS.values()
    found = [
        *ours,
        *(replace(variant, key_starts=False) for variant in ours),
        *map(stock_twin, ours),
        *WORDS.values(),
        *(Variant(v.head_dim, v.head_dim_v, v.causal, callback="word32") for v in ours),
        *beside_upstreams,
        *(replace(variant, stock_kernel=True) for variant in beside_upstreams),
        *ALONE,
        *three,
        SLICED,
        *(replace(variant, batch=1) for variant in three),
    ]
    return list(dict.fromkeys(x for v in found for x in (v.unmasked, v)))


@pytest.fixture(params=OURS.values(), ids=OURS)
def ours(request) -> Variant:
    """A kernel with one of this project's callbacks."""
    return request.param


@pytest.fixture(params=WITH_KEY_STARTS.values(), ids=WITH_KEY_STARTS)
def with_key_starts(request) -> Variant:
    """A kernel whose callback gets the key starts as a tensor of their own."""
    return request.param


@pytest.fixture(params=DIAGONAL.values(), ids=DIAGONAL)
def masked_causal(request) -> Variant:
    """A 192/128 kernel with a callback and FA4's diagonal."""
    return request.param


@pytest.fixture(params=WORDS.values(), ids=WORDS)
def one_word(request) -> Variant:
    """A kernel whose callback loads one word a call."""
    return request.param


@pytest.fixture(params=UNAFFECTED.values(), ids=UNAFFECTED)
def unaffected(request) -> Variant:
    """A kernel that has no key blocks with a callback and a diagonal."""
    return request.param


@pytest.fixture(scope="session")
def require_disassembler() -> Callable[[], None]:
    """A check: a missing disassembler fails in CI and skips elsewhere."""

    def check() -> None:
        try:
            for tool in ("nvdisasm", "cuobjdump"):
                disassembly.find_tool(tool)
        except DisassemblerMissing as error:
            if os.environ.get("CI", "").lower() in ("1", "true"):
                pytest.fail(str(error))
            pytest.skip(str(error))

    return check


@pytest.fixture(params=THREE_REQUESTS.values(), ids=THREE_REQUESTS)
def three_requests(request) -> Variant:
    """A kernel for three requests."""
    return request.param


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Fills a folder of that name once per session, whichever worker asks first."""
    base: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def fill(name: str, make: Callable[[Path], None]) -> Path:
        folder, part = base / name, base / f"{name}.part"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                part.mkdir()
                make(part)
                part.rename(folder)
        return folder

    return fill


@pytest.fixture(scope="session")
def compiled(require_disassembler, once) -> dict[Variant, CodegenRecord]:
    """Records for sm_100a, by variant (without its target)."""
    require_disassembler()
    chosen = variants()

    def make(folder: Path) -> None:
        records = compile_variants(chosen, "sm_100a", jobs=os.cpu_count() or 2)
        text = json.dumps([record.to_dict() for record in records])
        (folder / "records.json").write_text(text)

    rows = json.loads((once("fa4-sm_100a", make) / "records.json").read_text())
    return dict(zip(chosen, map(CodegenRecord.from_dict, rows)))


# Heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim.
CONCAT_MLA_K = {
    "deepseek-16h": (16, 128, 64, 128),
    "deepseek-128h": (128, 128, 64, 128),
    "glm-64h": (64, 192, 64, 256),
}
# Heads of a rank, of the indexer, their RoPE layout, and whether queries are fp8.
FUSED_Q = {
    "-".join(map(str, key)): key
    for key in (
        *itertools.product((8, 128), (64,), (False,), (False, True)),
        *itertools.product((64,), (32,), (True,), (False, True)),
        *itertools.product((128,), (0,), (False,), (False, True)),
    )
}
STOCK_FUSED_Q = {"stock-128-64-False-False": FUSED_Q["128-64-False-False"]}


@pytest.fixture(params=CONCAT_MLA_K)
def dims_of_k(request) -> str:
    return request.param


@pytest.fixture(params=FUSED_Q)
def fused_q_key(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def other_kernels(once) -> Callable[[str], Path]:
    """Returns the folder of what the program of this name made for a target."""
    program = Path(__file__).with_name("other_kernels.py")
    keys = [json.dumps(table) for table in (CONCAT_MLA_K, FUSED_Q | STOCK_FUSED_Q)]

    def compile_for(target: str) -> Path:
        def make(folder: Path) -> None:
            dump = folder / "dump"
            dump.mkdir()
            env = os.environ | environment(target, dump)
            env |= {
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TRITON_CACHE_DIR": str(folder / "triton"),
            }
            env.pop("TRITON_INTERPRET", None)
            done = subprocess.run(
                [sys.executable, program, target, folder, *keys],
                env=env,
                cwd=folder,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-4000:]

        return once(f"others-{target}", make)

    return compile_for

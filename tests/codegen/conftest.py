# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles each variant once per session, whatever the number of xdist workers."""

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

# `make test` compiles what the layer calls and what that is compared with; all of it
# takes minutes more, and `make test-codegen`. What it adds shares its code with a call
# of the layer but for one store (no LSE) or index arithmetic (more requests, of which
# the 192/128 kernel knows nothing), or is a callback that no such call has.
GRID = pytest.mark.extra

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
        ("full-nolse", False, False),
    )
}
CELLS["256-full-lse-b2"] = Variant(256, 256, batch=2)
CELLS["256-causal-lse-b2"] = Variant(256, 256, causal=True, batch=2)


def _params(variants: dict[str, Variant]) -> list:
    return [
        pytest.param(variant, id=name, marks=() if _in_make_test(variant) else GRID)
        for name, variant in variants.items()
    ]


def _in_make_test(variant: Variant) -> bool:
    if variant.batch > 1 or variant.callback in BASELINES:
        return False
    return variant.lse or (variant.causal and variant.callback == "dense")


OURS = _params(
    {
        f"{cell}-{name}": replace(CELLS[cell], callback=callback, key_starts=starts)
        for cell in CELLS
        for name, (callback, starts) in CALLBACKS.items()
    }
)
# The calls of the 192/128 kernel that apply a diagonal, each beside upstream's kernel.
DIAGONAL = _params(
    {
        f"{'lse' if lse else 'nolse'}-b{batch}-{name}": Variant(
            causal=True, lse=lse, batch=batch, callback=callback, key_starts=starts
        )
        for lse in (True, False)
        for batch in (1, 2)
        for name, (callback, starts) in (
            *CALLBACKS.items(),
            *((name, (name, False)) for name in BASELINES),
        )
    }
)
# Kernels without key blocks that get both.
UNAFFECTED = [
    pytest.param(Variant(causal=True), id="192-causal-unmasked"),
    pytest.param(Variant(causal=True, lse=False), id="192-causal-nolse", marks=GRID),
    pytest.param(Variant(callback="dense"), id="192-full-dense", marks=GRID),
    pytest.param(Variant(callback="offset"), id="192-full-offset", marks=GRID),
    *(
        pytest.param(
            Variant(256, 256, causal=True, callback=callback),
            id=f"256-causal-{callback}",
            marks=GRID,
        )
        for callback in ("none", "dense", "offset")
    ),
]
WORDS = [
    Variant(*dims, causal, callback="word32")
    for dims in HEAD_DIMS
    for causal in (False, True)
]
ALONE = [
    *(Variant(callback=c, key_starts=k, alone=True) for c, k in CALLBACKS.values()),
    *(Variant(callback=c, alone=True) for c in BASELINES),
]
SLICED = (
    Variant(batch=3, callback="dense"),
    Variant(batch=3, callback="dense", sliced=True),
)


def stock_twin(variant: Variant) -> Variant:
    """The same kernel with the stock callback of the same kind."""
    return replace(variant, callback=f"stock_{variant.callback}", key_starts=False)


@pytest.fixture(name="stock_twin", scope="session")
def stock_twin_fixture() -> Callable[[Variant], Variant]:
    return stock_twin


def variants(grid: bool) -> list[Variant]:
    """What the tests compare: all of it, or what ``make test`` does."""

    def chosen(params: list) -> list[Variant]:
        return [p.values[0] for p in params if grid or not p.marks]

    ours = chosen(OURS)
    beside_upstreams = chosen(DIAGONAL) + chosen(UNAFFECTED)
    found = [
        *ours,
        *map(stock_twin, ours),
        *WORDS,
        *ALONE,
        *(SLICED if grid else ()),
        *beside_upstreams,
        *(replace(variant, stock_kernel=True) for variant in beside_upstreams),
    ]
    return list(dict.fromkeys(x for v in found for x in (v.unmasked, v)))


@pytest.fixture(params=OURS)
def ours(request) -> Variant:
    """A kernel with one of this project's callbacks."""
    return request.param


@pytest.fixture(params=[p for p in OURS if p.values[0].key_starts])
def with_key_starts(request) -> Variant:
    """A kernel whose callback gets the key starts as a tensor of their own."""
    return request.param


@pytest.fixture(params=DIAGONAL)
def masked_causal(request) -> Variant:
    """A 192/128 kernel with a callback and FA4's diagonal."""
    return request.param


@pytest.fixture(params=UNAFFECTED)
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


@pytest.fixture(scope="session")
def compiled(
    request: pytest.FixtureRequest,
    require_disassembler,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Variant, CodegenRecord]:
    """Records for sm_100a, by variant (without its target)."""
    require_disassembler()
    chosen = variants(
        grid=any(item.get_closest_marker(GRID.name) for item in request.session.items)
    )
    folder: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    cache = folder / "codegen.json"
    with FileLock(f"{cache}.lock"):
        if not cache.exists():
            records = compile_variants(chosen, "sm_100a", jobs=os.cpu_count() or 2)
            cache.write_text(json.dumps([record.to_dict() for record in records]))
        found = map(CodegenRecord.from_dict, json.loads(cache.read_text()))
        return dict(zip(chosen, found))


@pytest.fixture(scope="session")
def run_for_target() -> Callable[..., str]:
    """Runs code in a process of its own, whose DSL compiles for a target: its output.

    The DSL latches its target at its first import. What it keeps goes to ``dump`` in
    the folder, which the code finds by its arguments.
    """

    def run(folder: Path, target: str, code: str, *arguments: str) -> str:
        dump = folder / "dump"
        dump.mkdir()
        env = os.environ | environment(target, dump)
        env |= {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
        env.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run

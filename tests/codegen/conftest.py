# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles each variant once per session, whatever the number of xdist workers."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from vllm_sparse_mla.codegen import (
    CodegenRecord,
    DisassemblerMissing,
    Variant,
    compile_variants,
    disassembly,
)

CELLS = (
    *((192, 128, causal, lse, 1) for causal in (False, True) for lse in (True, False)),
    *((256, 256, causal, lse, 1) for causal in (False, True) for lse in (True, False)),
    # Only the 256/256 kernel knows whether there is one request.
    *((256, 256, causal, True, 2) for causal in (False, True)),
)
CALLBACKS = (
    ("none", False),
    ("stock_dense", False),
    ("stock_offset", False),
    ("dense", False),
    ("offset", False),
    ("offset", True),
)
VARIANTS = (
    *(Variant(*cell, *callback) for cell in CELLS for callback in CALLBACKS),
    *(Variant(*cell, "word32") for cell in CELLS if cell[3:] == (True, 1)),
    Variant(batch=3),
    Variant(batch=3, callback="dense"),
    Variant(batch=3, callback="dense", sliced=True),
    *(Variant(callback=name, key_starts=k, alone=True) for name, k in CALLBACKS),
    Variant(callback="word32", alone=True),
)


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
    require_disassembler, tmp_path_factory: pytest.TempPathFactory
) -> dict[Variant, CodegenRecord]:
    """Records of ``VARIANTS`` for sm_100a, by variant (without its target)."""
    require_disassembler()
    folder: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    cache = folder / "codegen.json"
    with FileLock(f"{cache}.lock"):
        if not cache.exists():
            records = compile_variants(VARIANTS, "sm_100a", jobs=os.cpu_count() or 2)
            cache.write_text(json.dumps([record.to_dict() for record in records]))
        found = map(CodegenRecord.from_dict, json.loads(cache.read_text()))
        return dict(zip(VARIANTS, found))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the callbacks compile to in FA4's SM100 kernel, and whether that holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_sparse_mla.codegen import CodegenRecord, Variant, compile_variants

ARCH = "sm_100a"

# 128-bit loads of each mask application.
_VECTOR_LOADS = {"dense": 1, "offset": 2}
# The offset callback also reads its key start, one 32-bit word.
_WORD_LOADS = {"dense": 0, "offset": 1}

# As the layer calls them: the suffix is causal and takes the key start from the
# mask, a context chunk is not and brings its own.
VARIANTS = (
    Variant(callback="stock_dense"),
    Variant(callback="stock_offset"),
    Variant(callback="dense"),
    Variant(callback="dense", causal=True),
    Variant(callback="offset", causal=True),
    Variant(callback="offset", key_starts=True),
)


@dataclass(frozen=True)
class CallbackResult:
    """The mask's loads in one compiled kernel."""

    record: CodegenRecord  # the kernel's
    # Whether the callback is this project's, and so has to hold; the stock ones are
    # there to compare with.
    judged: bool
    problem: str = ""  # what does not hold; empty if all does

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def loads(self) -> tuple[int, int]:
        """Loads of 128 and of 32 bits over the unmasked kernel."""
        found = self.record.mask_loads or {}
        return found.get(128, 0), found.get(32, 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON.

        Local-memory instructions are not judged: any callback, stock or not, can make
        FA4's kernel spill a few registers.
        """
        record = self.record
        vector_loads, word_loads = self.loads
        return {
            "ok": self.ok,
            "callback": record.variant.callback_label,
            "causal": record.variant.causal,
            "target": record.target,
            "instructions": record.instructions,
            "applications": record.applications,
            "vector_loads": vector_loads,
            "word_loads": word_loads,
            "local_opcodes": record.local_opcodes,
            "judged": self.judged,
            "problem": self.problem,
        }


def _problem(record: CodegenRecord) -> str:
    callback = record.variant.callback
    loads = dict(record.mask_loads or {})
    vector, word = loads.pop(128, 0), loads.pop(32, 0)
    if record.applications < 1:
        return "the kernel does not apply the mask"
    if record.target != ARCH:
        return f"built for {record.target}, not {ARCH}"
    expected = _VECTOR_LOADS[callback] * record.applications
    if vector != expected:
        return f"{vector} 128-bit loads, {expected} expected"
    allowed = _WORD_LOADS[callback] * record.applications
    if word > allowed:
        return f"{word} 32-bit loads, at most {allowed} allowed"
    if any(count > 0 for count in loads.values()):
        return f"mask loads of other widths: {loads}"
    return ""


def judge_record(record: CodegenRecord) -> CallbackResult:
    """Judge one compiled variant; stock callbacks are reported only."""
    judged = record.variant.callback in _VECTOR_LOADS
    return CallbackResult(record, judged, _problem(record) if judged else "")


def compile_callbacks(
    progress: Callable[[CodegenRecord], None],
) -> list[CallbackResult]:
    """Cross-compile FA4 with each callback; takes no GPU.

    Args:
        progress: called with each record, from other threads, as it comes.

    Raises:
        CodegenError: if a variant does not compile.
        DisassemblerMissing: if Triton's disassembler is not installed.
    """
    return [
        judge_record(record)
        for record in compile_variants(VARIANTS, ARCH, progress=progress)
    ]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the instrument reports about one compiled kernel."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from vllm_sparse_mla.codegen.variants import Variant


@dataclass(frozen=True)
class CodegenRecord:
    """Facts read from one cubin and its PTX.

    Attributes:
        variant: what was asked for, target included.
        kernel: symbol of the kernel in the cubin.
        target: architecture that ptxas says it built for, such as ``sm_100a``.
        cubin_bytes: size of the cubin.
        instructions: SASS instructions other than NOP.
        opcodes: count of each SASS opcode, without its modifiers.
        loop_opcodes: the same of the softmax loop alone: the shortest loop that holds
            the exponentials of a key block, hence what runs once per key block where
            no sequence end or diagonal is checked. Empty if there is none.
        global_loads: SASS loads from global memory by width in bits.
        mask_loads: the same less those of the unmasked kernel of the same
            variant; only non-zero differences. None until that is known.
        added_instructions: ``instructions`` less those of the unmasked kernel.
        added_opcodes: ``opcodes`` less those of the unmasked kernel, non-zero only.
        added_loop_opcodes: ``loop_opcodes`` less those of the unmasked kernel; empty
            if the mask's loads are elsewhere, for then that loop is not the mask's.
        registers: registers a thread at launch. FA4 redistributes them among its
            warps with setmaxnreg, so this is the allocation and not the pressure.
        local_bytes: local memory a thread in bytes (stack frame and spills).
        local_opcodes: LDL and STL instructions.
        ptx_loads: PTX loads from global memory by width in bits.
        applications: how often the mask was applied to a tile while FA4 traced
            the kernel, which is how often the code for it is in the kernel.
        mask_calls: how often the callback was called in that trace.
        vec_size: keys that one call of the callback covers; 1 if scalar.
        versions: of vllm, torch, the DSL, ptxas and the disassembler.
        seconds: time to compile, without the imports.
    """

    variant: Variant
    kernel: str
    target: str
    cubin_bytes: int
    instructions: int
    opcodes: dict[str, int]
    global_loads: dict[int, int]
    registers: int
    local_bytes: int
    local_opcodes: int
    ptx_loads: dict[int, int]
    applications: int
    mask_calls: int
    vec_size: int
    versions: dict[str, str]
    seconds: float
    loop_opcodes: dict[str, int] = field(default_factory=dict)
    mask_loads: dict[int, int] | None = None
    added_instructions: int | None = None
    added_opcodes: dict[str, int] = field(default_factory=dict)
    added_loop_opcodes: dict[str, int] = field(default_factory=dict)

    @property
    def loop_instructions(self) -> int:
        """Instructions of the softmax loop."""
        return sum(self.loop_opcodes.values())

    def against(self, unmasked: "CodegenRecord") -> "CodegenRecord":
        """Return this record with the differences from the unmasked kernel."""
        added_loop = _difference(self.loop_opcodes, unmasked.loop_opcodes)
        return replace(
            self,
            mask_loads=_difference(self.global_loads, unmasked.global_loads),
            added_instructions=self.instructions - unmasked.instructions,
            added_opcodes=_difference(self.opcodes, unmasked.opcodes),
            added_loop_opcodes=added_loop if "LDG" in added_loop else {},
        )

    def to_dict(self) -> dict:
        """Plain dictionaries and scalars, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> "CodegenRecord":
        """Inverse of ``to_dict``, also after JSON turned widths into strings."""
        values = dict(values)
        values["variant"] = Variant(**values["variant"])
        for name in ("global_loads", "ptx_loads", "mask_loads"):
            if values.get(name) is not None:
                values[name] = {int(k): v for k, v in values[name].items()}
        return cls(**values)


def _difference(ours: Mapping, theirs: Mapping) -> dict:
    keys = [*ours, *(key for key in theirs if key not in ours)]
    deltas = {key: ours.get(key, 0) - theirs.get(key, 0) for key in keys}
    return {key: delta for key, delta in deltas.items() if delta}

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the instrument reports about one compiled kernel."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from vllm_sparse_mla.codegen.disassembly import Cubin
from vllm_sparse_mla.codegen.variants import Variant

# What a record that is kept for its tables can do without.
LONG = {"opcodes": {}, "added_opcodes": {}, "cubin_bytes": 0, "seconds": 0.0}


@dataclass(frozen=True)
class CodegenRecord(Cubin):
    """Facts read from one cubin, its PTX, and how it was made."""

    variant: Variant  # what was asked for, target included
    ptx_loads: dict[int, int]  # PTX loads from global memory by width in bits
    # How often the mask was applied to a tile while FA4 traced the kernel, which is how
    # often the code for it is in the kernel.
    applications: int
    mask_calls: int  # how often the callback was called in that trace
    vec_size: int  # keys that one call of the callback covers; 1 if scalar
    cubin_bytes: int  # size of the cubin
    seconds: float  # time to compile, without the imports
    # ``global_loads`` less those of the unmasked kernel of the same variant, where that
    # is not 0. None until that is known.
    mask_loads: dict[int, int] | None = None
    # ``instructions`` less those of the unmasked kernel.
    added_instructions: int | None = None
    # ``opcodes`` less those of the unmasked kernel, non-zero only.
    added_opcodes: dict[str, int] = field(default_factory=dict)
    # ``loop_opcodes`` less those of the unmasked kernel; empty if the mask's loads are
    # elsewhere, for then that loop is not the mask's.
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
        """Inverse of ``to_dict``, also after JSON turned widths into strings.

        What `LONG` names may be missing.
        """
        values = LONG | values
        values["variant"] = Variant(**values["variant"])
        for name in ("global_loads", "ptx_loads", "mask_loads"):
            if values.get(name) is not None:
                values[name] = {int(k): v for k, v in values[name].items()}
        return cls(**values)


def _difference(ours: Mapping, theirs: Mapping) -> dict:
    keys = [*ours, *(key for key in theirs if key not in ours)]
    deltas = {key: ours.get(key, 0) - theirs.get(key, 0) for key in keys}
    return {key: delta for key, delta in deltas.items() if delta}

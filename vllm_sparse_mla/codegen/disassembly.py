# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reads cubins with the disassembler inside Triton's package, and kept PTX."""

import importlib.util
import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_LOAD_WIDTH = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_INSTRUCTION_BYTES = 16
# A thread's share of a key block is at least 64 scores; FA4 may compute a part of the
# exponentials with polynomials, but not half of them.
_EXPONENTIALS = 32
_PTX_LOAD = re.compile(r"\bld(?:\.\w+)*?\.global([.:\w]*)")


class DisassemblerMissing(RuntimeError):
    """nvdisasm or cuobjdump is not where Triton's package has it."""


@dataclass(frozen=True)
class Cubin:
    """What the disassembler says about one cubin."""

    kernel: str  # symbol of the kernel
    target: str  # architecture that ptxas says it built for, such as ``sm_100a``
    instructions: int  # SASS instructions other than NOP
    opcodes: dict[str, int]  # count of each SASS opcode, without its modifiers
    # The same of the softmax loop alone: the shortest loop that holds the exponentials
    # of a key block, hence what runs once per key block where no sequence end or
    # diagonal is checked. Empty if there is none.
    loop_opcodes: dict[str, int]
    global_loads: dict[int, int]  # SASS loads from global memory by width in bits
    # Registers a thread at launch. FA4 redistributes them among its warps with
    # setmaxnreg, so this is the allocation and not the pressure.
    registers: int
    local_bytes: int  # local memory a thread in bytes (stack frame and spills)
    local_opcodes: int  # LDL and STL instructions
    # Of ptxas and the disassembler; of a record also of vllm, torch and the DSL.
    versions: dict[str, str]


def find_tool(name: str) -> Path:
    """Path of ``nvdisasm`` or ``cuobjdump``, without importing Triton.

    Raises:
        DisassemblerMissing: if the installed Triton has none.
    """
    spec = importlib.util.find_spec("triton")
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return path
    raise DisassemblerMissing(
        f"{name} not found in the installed triton package "
        "(triton/backends/nvidia/bin); install the triton that the installed "
        "vllm requires"
    )


def _output_of(tool: str, *args: str | Path) -> str:
    command = [find_tool(tool), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done.stdout


def read_cubin(path: Path) -> Cubin:
    """Disassemble a cubin that holds one kernel.

    Raises:
        DisassemblerMissing: without the tools.
        RuntimeError: if the cubin holds no kernel, or several.
    """
    header, functions = json.loads(_output_of("nvdisasm", "-json", path))
    opcodes: Counter[str] = Counter()
    loads: Counter[int] = Counter()
    for function in functions:
        for instruction in function["sass-instructions"]:
            opcode, *modifiers = instruction["opcode"].split(".")
            opcodes[opcode] += 1
            if opcode == "LDG":
                loads[load_width(modifiers)] += 1
    usage = re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)",
        _output_of("cuobjdump", "-res-usage", path),
    )
    if len(usage) != 1:
        raise RuntimeError(f"expected one kernel in {path.name}, found {len(usage)}")
    kernel, registers, stack, local = usage[0]
    tools = header[".note.nv.tkinfo"]
    target = re.search(r"-arch (\S+)", tools["tki_toolOptions"])
    return Cubin(
        kernel=kernel,
        target=target[1] if target else "",
        instructions=sum(n for name, n in opcodes.items() if name != "NOP"),
        opcodes=dict(sorted(opcodes.items())),
        loop_opcodes=dict(sorted(_softmax_loop(functions).items())),
        global_loads=dict(sorted(loads.items())),
        registers=int(registers),
        local_bytes=int(stack) + int(local),
        local_opcodes=opcodes["LDL"] + opcodes["STL"],
        versions={
            "ptxas": tools["tki_toolVersion"].rsplit(" ", 1)[-1],
            "nvdisasm": header["Producer"].split()[1],
        },
    )


def _softmax_loop(functions: list[dict]) -> Counter[str]:
    """Opcodes, without NOP, of the shortest loop that holds a tile's exponentials.

    A loop is what lies between a backward branch and its target. Empty if none does.
    """
    loops = []
    for function in functions:
        body = function["sass-instructions"]
        for index, instruction in enumerate(body):
            if not instruction["opcode"].startswith("BRA"):
                continue
            # Addresses count from the function's start.
            target = int(instruction["operands"].rpartition("0x")[2], 16)
            inside = body[target // _INSTRUCTION_BYTES : index + 1]
            names = [other["opcode"] for other in inside]
            if names.count("MUFU.EX2") >= _EXPONENTIALS:
                loops.append(Counter(name.split(".")[0] for name in names))
    loop = min(loops, key=Counter.total, default=Counter())
    del loop["NOP"]
    return loop


def load_width(modifiers: list[str]) -> int:
    """Bits that an LDG with these modifiers reads a thread."""
    return next((_LOAD_WIDTH[m] for m in modifiers if m in _LOAD_WIDTH), 32)


def read_ptx_loads(text: str) -> dict[int, int]:
    """Count loads from global memory in PTX by width in bits."""
    widths: Counter[int] = Counter()
    for match in _PTX_LOAD.finditer(text):
        parts = re.split(r"[.:]", match[1])
        vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
        element = next((int(p[1:]) for p in parts if re.fullmatch(r"[bsuf]\d+", p)), 0)
        widths[vector * element] += 1
    return dict(sorted(widths.items()))

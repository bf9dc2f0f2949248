# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What pages show of the records of compiled_kernels.py, as Markdown."""

from collections.abc import Sequence

from result_tables import markdown, pivot

from vllm_sparse_mla.codegen import CodegenRecord
from vllm_sparse_mla.codegen.table import columns, widths_text

Rows = Sequence[dict]
CAUSAL = "192/128 causal"


def _name(record: CodegenRecord) -> str:
    label = record.variant.callback_label
    return "unmasked" if label == "none" else label


def _kernel(record: CodegenRecord) -> str:
    v = record.variant
    return f"{v.head_dim}/{v.head_dim_v} {'causal' if v.causal else 'full'}"


def _place(record: CodegenRecord) -> dict[str, str]:
    return {"kernel": _kernel(record), "callback": _name(record)}


def _kernels(rows: Rows, stock_kernel: bool = False) -> list[CodegenRecord]:
    """FA4's kernels with LSE, the patch set's or stock's."""
    return [
        record
        for record in map(CodegenRecord.from_dict, rows)
        if not record.variant.alone
        and record.variant.lse
        and record.variant.stock_kernel is stock_kernel
    ]


def versions(rows: Rows) -> str:
    """With what the kernels were compiled and read."""
    return ", ".join(f"{name} {v}" for name, v in sorted(rows[0]["versions"].items()))


def compiled(rows: Rows) -> str:
    """Every kernel: instructions, loads, registers."""
    return markdown([_place(record) | columns(record) for record in _kernels(rows)])


def beside_stock(rows: Rows) -> str:
    """The callbacks beside stock's: instructions and mask loads."""
    names = ("stock_dense", "dense", "stock_offset", "offset+key_starts")
    return markdown(
        [
            _place(record)
            | {
                "SASS instructions": record.instructions,
                "over unmasked": f"{record.added_instructions:+d}",
                "mask loads": widths_text(record.mask_loads),
            }
            for record in _kernels(rows)
            if _name(record) in names
        ]
    )


def diagonal(rows: Rows) -> str:
    """Softmax loop and kernel of 192/128 causal, stock's and with the edit."""
    edited = {(_kernel(r), _name(r)): r for r in _kernels(rows)}
    table = []
    for stock in _kernels(rows, stock_kernel=True):
        ours = edited[_kernel(stock), _name(stock)]
        table.append(
            {
                CAUSAL: _name(stock),
                "loop, stock": stock.loop_instructions,
                "loop, edited": ours.loop_instructions,
                "kernel, stock": stock.instructions,
                "kernel, edited": ours.instructions,
            }
        )
    return markdown(table)


def diagonal_prediction(rows: Rows) -> str:
    """What the loops alone would cost a long causal prefill."""
    stock, edited = (
        {
            _name(record): record.loop_instructions
            for record in _kernels(rows, stock_kernel)
            if _kernel(record) == CAUSAL
        }
        for stock_kernel in (True, False)
    )
    parts = []
    for name in ("dense", "offset+key_starts"):
        before, after = (100 * (x[name] / x["unmasked"] - 1) for x in (stock, edited))
        share = edited[name] / stock[name]
        parts.append(
            f"`{name}` {before:+.0f} % over unmasked in stock's kernel and "
            f"{after:+.0f} % in the edited one, so {share:.2f} of the time"
        )
    return (
        "**A prediction; nothing here was measured.** If issuing the softmax warps' "
        "instructions were all that counts, a mask would cost a long causal prefill: "
        f"{'; '.join(parts)}. The time of the matrix products hides a part of either."
    )


def loop_opcodes(rows: Rows) -> str:
    """What each callback adds to the softmax loop of 192/128 without the diagonal."""
    named = ("FSEL", "R2P", "LOP3", "LDG", "SEL")
    table = []
    for record in _kernels(rows):
        added = record.added_loop_opcodes
        if _kernel(record) == "192/128 full" and added:
            spills = added.get("LDL", 0) + added.get("STL", 0)
            shown = {name: added.get(name, 0) for name in named} | {"spills": spills}
            total = sum(added.values())
            other = total - sum(shown.values())
            line = {"callback": _name(record), "added": total}
            table.append(line | shown | {"address and other": other})
    return markdown(table)


def alone(rows: Rows) -> str:
    """A callback's own code: a kernel that only calls it, less one without it."""
    return markdown(
        [
            {
                "callback": _name(record),
                "instructions": record.added_instructions,
                "loads": widths_text(record.mask_loads),
            }
            for record in map(CodegenRecord.from_dict, rows)
            if record.variant.alone and record.variant.callback != "none"
        ]
    )


def compiled_sm90(rows: Rows) -> str:
    """Instructions of each kernel, in brackets those over the unmasked one."""
    table = []
    for record in map(CodegenRecord.from_dict, rows):
        over = f" ({record.added_instructions:+d})"
        cell = f"{record.instructions}" + over * (_name(record) != "unmasked")
        lse = {"LSE": "with" if record.variant.lse else "without"}
        table.append(_place(record) | lse | {"cell": cell})
    return markdown(pivot(table, ("kernel", "LSE"), "callback", lambda r: r["cell"]))


def resources_sm90(rows: Rows) -> str:
    """Mask loads, registers and local memory of the kernels with LSE."""
    names = ("mask loads", "regs", "local B")
    return markdown(
        [
            _place(record) | {name: columns(record)[name] for name in names}
            for record in _kernels(rows)
        ]
    )

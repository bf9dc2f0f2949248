# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What pages show of the records of compiled_kernels.py, as Markdown."""

from collections.abc import Sequence

from result_tables import markdown, pivot

from vllm_sparse_mla.codegen.table import widths_text

Rows = Sequence[dict]


def _name(row: dict) -> str:
    variant = row["variant"]
    callback = "unmasked" if variant["callback"] == "none" else variant["callback"]
    return callback + "+key_starts" * variant["key_starts"]


def _kernel(row: dict) -> str:
    variant = row["variant"]
    mode = "causal" if variant["causal"] else "full"
    return f"{variant['head_dim']}/{variant['head_dim_v']} {mode}"


def _loop(row: dict) -> int:
    return sum(row["loop_opcodes"].values())


def _loads(row: dict, kind: str) -> str:
    return widths_text({int(bits): n for bits, n in (row[kind] or {}).items()})


def _kernels(rows: Rows, stock_kernel: bool = False) -> list[dict]:
    """FA4's kernels with LSE, the patch set's or stock's."""
    return [
        row
        for row in rows
        if not row["variant"]["alone"]
        and row["variant"]["lse"]
        and row["variant"]["stock_kernel"] is stock_kernel
    ]


def versions(rows: Rows) -> str:
    """With what the kernels were compiled and read."""
    return ", ".join(f"{name} {v}" for name, v in sorted(rows[0]["versions"].items()))


def compiled(rows: Rows) -> str:
    """Every kernel: instructions, loads, registers."""
    return markdown(
        [
            {
                "kernel": _kernel(row),
                "callback": _name(row),
                "SASS": row["instructions"],
                "+mask": f"{row['added_instructions']:+d}",
                "applied": row["applications"],
                "loop": _loop(row),
                "+loop": f"{sum(row['added_loop_opcodes'].values()):+d}"
                if row["added_loop_opcodes"]
                else "-",
                "mask loads": _loads(row, "mask_loads"),
                "PTX loads": _loads(row, "ptx_loads"),
                "regs": row["registers"],
                "local B": row["local_bytes"],
                "LDL+STL": row["local_opcodes"],
            }
            for row in _kernels(rows)
        ]
    )


def beside_stock(rows: Rows) -> str:
    """The callbacks beside stock's: instructions and mask loads."""
    names = ("stock_dense", "dense", "stock_offset", "offset+key_starts")
    return markdown(
        [
            {
                "kernel": _kernel(row),
                "callback": _name(row),
                "SASS instructions": row["instructions"],
                "over unmasked": f"{row['added_instructions']:+d}",
                "mask loads": _loads(row, "mask_loads"),
            }
            for row in _kernels(rows)
            if _name(row) in names
        ]
    )


def diagonal(rows: Rows) -> str:
    """Softmax loop and kernel of 192/128 causal, stock's and with the edit."""
    edited = {(_kernel(row), _name(row)): row for row in _kernels(rows)}
    table = []
    for stock in _kernels(rows, stock_kernel=True):
        ours = edited[_kernel(stock), _name(stock)]
        table.append(
            {
                "192/128 causal": _name(stock),
                "loop, stock": _loop(stock),
                "loop, edited": _loop(ours),
                "kernel, stock": stock["instructions"],
                "kernel, edited": ours["instructions"],
            }
        )
    return markdown(table)


def diagonal_prediction(rows: Rows) -> str:
    """What the loops alone would cost a long causal prefill."""

    def loops(stock_kernel: bool) -> dict[str, int]:
        found = _kernels(rows, stock_kernel)
        return {_name(r): _loop(r) for r in found if _kernel(r) == "192/128 causal"}

    stock, edited = loops(True), loops(False)
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
    for row in _kernels(rows):
        added = row["added_loop_opcodes"]
        if _kernel(row) == "192/128 full" and added:
            spills = added.get("LDL", 0) + added.get("STL", 0)
            shown = {name: added.get(name, 0) for name in named} | {"spills": spills}
            total = sum(added.values())
            other = total - sum(shown.values())
            line = {"callback": _name(row), "added": total}
            table.append(line | shown | {"address and other": other})
    return markdown(table)


def alone(rows: Rows) -> str:
    """A callback's own code: a kernel that only calls it, less one without it."""
    return markdown(
        [
            {
                "callback": _name(row),
                "instructions": row["added_instructions"],
                "loads": _loads(row, "mask_loads"),
            }
            for row in rows
            if row["variant"]["alone"] and row["variant"]["callback"] != "none"
        ]
    )


def compiled_sm90(rows: Rows) -> str:
    """Instructions of each kernel, in brackets those over the unmasked one."""

    def cell(row: dict) -> str:
        total = row["instructions"]
        if row["variant"]["callback"] == "none":
            return f"{total}"
        return f"{total} ({row['added_instructions']:+d})"

    rows = [
        {"kernel": _kernel(row), "callback": _name(row)}
        | {"LSE": "with" if row["variant"]["lse"] else "without", "cell": cell(row)}
        for row in rows
    ]
    return markdown(pivot(rows, ("kernel", "LSE"), "callback", lambda r: r["cell"]))


def resources_sm90(rows: Rows) -> str:
    """Mask loads, registers and local memory of the kernels with LSE."""
    return markdown(
        [
            {
                "kernel": _kernel(row),
                "callback": _name(row),
                "mask loads": _loads(row, "mask_loads"),
                "regs": row["registers"],
                "local B": row["local_bytes"],
            }
            for row in _kernels(rows)
        ]
    )

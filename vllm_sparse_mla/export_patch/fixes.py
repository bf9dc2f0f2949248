# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Edits of upstream's own functions, with which the series begins.

A fix of a few lines can be merged by itself; a later patch replaces the function by
the overlay's. As those that the overlay applies (``vllm_sparse_mla/edits.py``), an edit
is a pattern and what becomes of its match, but these may add lines.
"""

from collections.abc import Callable

import libcst as cst
import libcst.matchers as m

from vllm_sparse_mla.edits import Edit, saved

_LAYER = "vllm/model_executor/layers/attention/sparse_mla_attention.py"
_RUN = "SparseMLACommonImpl._run_masked_mha"
_KERNELS = ("_scatter_topk_kernel", "_scatter_topk_single_req_kernel")

_Change = Callable[[cst.CSTNode], cst.CSTNode | cst.FlattenSentinel]


def _line(pattern: m.BaseMatcherNode) -> m.BaseMatcherNode:
    return saved(m.SimpleStatementLine([pattern]))


def _assigned(name: str, value: m.BaseMatcherNode) -> m.BaseMatcherNode:
    return m.Assign([m.AssignTarget(m.Name(name))], value)


def _becomes(code: str) -> _Change:
    return lambda old: cst.parse_expression(code)


def _above(code: str) -> _Change:
    statement = cst.parse_statement(code)
    return lambda old: cst.FlattenSentinel([statement, old])


def _below(code: str) -> _Change:
    statement = cst.parse_statement(code)
    return lambda old: cst.FlattenSentinel([old, statement])


def _narrowed(code: str) -> _Change:
    """A condition with another one that has to hold."""
    return lambda old: cst.parse_expression(f"_ & {code}").with_changes(left=old)


def _after_another_parameter(name: str) -> _Change:
    return lambda old: cst.FlattenSentinel([cst.Param(cst.Name(name)), old])


def _with_argument(name: str, value: str) -> _Change:
    """A call with one more keyword argument, laid out as its last one."""

    def change(old: cst.Call) -> cst.Call:
        more = old.args[-1].with_changes(
            keyword=cst.Name(name), value=cst.parse_expression(value)
        )
        last = old.args[-1].with_changes(comma=old.args[-2].comma)
        return old.with_changes(args=[*old.args[:-1], last, more])

    return change


def _launch(kernel: str) -> m.BaseMatcherNode:
    return saved(m.Call(m.Subscript(m.Name(kernel))))


_SPLIT_GUARD = """\
# Split keys can halve SM100's column tile to 64 keys, which callbacks of 128
# columns do not read exactly.
kwargs["num_splits"] = 1
"""
_BARRIER = """\
# Bits are set by other threads than those that clear their words.
tl.debug_barrier()
"""

#: Edits by patch, then by file.
FIXES: dict[str, dict[str, tuple[Edit, ...]]] = {
    "exact-key-offsets": {
        _LAYER: (Edit(_RUN, _line(m.Return()), _above(_SPLIT_GUARD)),),
    },
    "defined-mask-words": {
        _LAYER: (
            *(
                edit
                for kernel in _KERNELS
                for edit in (
                    Edit(
                        kernel,
                        saved(m.Param(m.Name("num_words"))),
                        _after_another_parameter("num_keys"),
                    ),
                    Edit(
                        kernel,
                        _line(m.Expr(m.Call(m.Attribute(attr=m.Name("store"))))),
                        _below(_BARRIER),
                    ),
                    Edit(
                        kernel,
                        _assigned("valid", saved(m.DoNotCare())),
                        _narrowed("(indices < num_keys)"),
                    ),
                    Edit(
                        "_build_topk_mask",
                        _launch(kernel),
                        _with_argument("num_keys", "max_seq_len"),
                    ),
                )
            ),
            Edit(
                "_build_topk_mask",
                _assigned("num_words", saved(m.DoNotCare())),
                _becomes("out.shape[-1]"),
            ),
        ),
    },
    "wide-mask-loads": {
        _LAYER: (
            Edit(
                _RUN,
                _line(_assigned("kwargs", m.Dict())),
                _above("check_topk_mask_storage(dense_mask)\n"),
            ),
        ),
    },
}

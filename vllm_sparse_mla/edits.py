# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Edits of single expressions in upstream's files: what they are, how they apply.

An edit names a function and a pattern of its syntax tree, and says what the matched
expression becomes; nothing of upstream's text is stored. The overlay's loader applies
it when the module is imported, the export when it writes the patch.

Importing libcst takes a third of a second, so only those two import this module.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m

#: Under this name a pattern saves the node that an edit changes.
CHANGED = "changed"


@dataclass(frozen=True)
class Edit:
    """A change of one expression.

    Attributes:
        function: qualified name, such as ``Class.method``.
        pattern: matches exactly one node inside the function, and saves the expression
            to change as ``CHANGED``.
        change: returns what that expression becomes, on as many lines.
        imports: statements that it needs at the top of the file; not for a module that
            may be edited where it is (``guard.EditedFile.keeps_name``).
        exported: whether the patch has it too.
    """

    function: str
    pattern: m.BaseMatcherNode
    change: Callable[[cst.BaseExpression], cst.BaseExpression]
    imports: tuple[str, ...] = ()
    exported: bool = True


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Apply edits to a file; every line keeps its number.

    Args:
        text: the file.
        edits: what to change.

    Raises:
        ValueError: if the file has not exactly one such function or expression, or an
            edit would move lines, or there is no blank line for an import.
    """
    tree = cst.parse_module(text)
    for edit in edits:
        function = _find_function(tree, edit.function)
        matches = m.extractall(function, edit.pattern)
        if len(matches) != 1:
            raise ValueError(
                f"an edit of {edit.function} must match once, and matches "
                f"{len(matches)} times"
            )
        old = matches[0][CHANGED]
        new = edit.change(old)
        if _lines(tree, new) != _lines(tree, old):
            raise ValueError(f"an edit of {edit.function} moves lines")
        tree = tree.with_deep_changes(
            function, body=function.body.deep_replace(old, new)
        )
    for statement in dict.fromkeys(name for edit in edits for name in edit.imports):
        tree = _with_import(tree, statement)
    return tree.code


def _with_import(tree: cst.Module, statement: str) -> cst.Module:
    """The file with one more import, in place of a blank line below the others."""
    imports = m.SimpleStatementLine([m.Import() | m.ImportFrom()])
    body = list(tree.body)
    below = 1 + max(i for i, node in enumerate(body) if m.matches(node, imports))
    lines = body[below].leading_lines
    if not lines or lines[0].comment:
        raise ValueError(f"there is no blank line for {statement!r}")
    body[below] = body[below].with_changes(leading_lines=lines[1:])
    body.insert(below, cst.parse_statement(statement))
    return tree.with_changes(body=body)


def _lines(tree: cst.Module, node: cst.CSTNode) -> int:
    return tree.code_for_node(node).count("\n")


def _find_function(tree: cst.Module, name: str) -> cst.FunctionDef:
    found = [tree]
    for part in name.split("."):
        definition = m.FunctionDef(m.Name(part)) | m.ClassDef(m.Name(part))
        bodies = [node if node is tree else node.body for node in found]
        found = [n for body in bodies for n in body.body if m.matches(n, definition)]
    if len(found) != 1:
        raise ValueError(f"expected one {name}, found {len(found)}")
    return found[0]


def _with_argument(call: cst.Call, name: str, value: str) -> cst.Call:
    """The call with one more keyword argument at its end."""
    added = cst.ensure_type(cst.parse_expression(f"f({name}={value})"), cst.Call)
    *first, last = call.args
    space = cst.SimpleWhitespace(" ")
    last = last.with_changes(comma=cst.Comma(whitespace_after=space))
    return call.with_changes(args=[*first, last, *added.args])


# The block of a loop that applies a callback, if there is one, and else no mask at all:
# no key of its blocks lies behind the diagonal.
_CALLBACK_ALONE = m.If(
    test=m.Call(
        m.Name("const_expr"),
        [m.Arg(m.Comparison(m.Attribute(m.Name("self"), m.Name("mask_mod"))))],
    ),
    body=m.IndentedBlock(
        [
            m.SimpleStatementLine(
                [
                    m.Assign(
                        value=m.Call(
                            m.Name("softmax_step"),
                            [
                                m.ZeroOrMore(),
                                m.Arg(
                                    m.SaveMatchedNode(
                                        m.Call(m.Name("partial")), CHANGED
                                    ),
                                    keyword=m.Name("mask_fn"),
                                ),
                            ],
                        )
                    )
                ]
            )
        ]
    ),
)

_NEW_DIGEST = m.Call(m.Attribute(m.Name("hashlib"), m.Name("sha256")), [])


def _with_digest_of_edits(call: cst.Call) -> cst.Call:
    """The new digest with this file in it."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return call.with_changes(args=[cst.Arg(cst.SimpleString(f'b"{digest}"'))])


def _ask_layer(call: cst.Call) -> cst.Call:
    """What the table admits goes through a question to the layer."""
    asked = cst.ensure_type(
        cst.parse_expression("self.impl.masked_mha_pays(self, attn_metadata, x)"),
        cst.Call,
    )
    return asked.with_deep_changes(asked.args[-1], value=call)


_LEAST_CAPABILITY = m.Call(
    m.Attribute(m.Name("current_platform"), m.Name("has_device_capability")),
    [m.Arg(m.SaveMatchedNode(m.Integer("100"), CHANGED))],
)
_KERNEL_CLASS = m.Assign(
    [m.AssignTarget(m.Name("kernel"))],
    m.Call(m.SaveMatchedNode(m.Name("FusedQKernel"), CHANGED)),
)


def _call(function: str, *arguments: m.BaseMatcherNode) -> m.Call:
    """A call of ``torch``'s function that begins with these arguments."""
    callee = m.Attribute(m.Name("torch"), m.Name(function))
    return m.Call(callee, [*map(m.Arg, arguments), m.ZeroOrMore()])


def _in_place_for_mha(new: cst.Call) -> cst.IfExp:
    """RoPE's output is its input where that lies beside the query's other part.

    So it does for MHA alone: MQA has another part by then, of a product.
    """
    text = "q_pe if q_pe.stride() == ql_nope.stride() else f()"
    either = cst.ensure_type(cst.parse_expression(text), cst.IfExp)
    return either.with_changes(orelse=new)


#: Edits by module.
EDITS: dict[str, tuple[Edit, ...]] = {
    "vllm.model_executor.layers.attention.mla_attention": (
        Edit(
            "MLAAttention._use_sparse_mha",
            m.SaveMatchedNode(m.Call(m.Name("_use_masked_mha")), CHANGED),
            _ask_layer,
        ),
    ),
    "vllm.models.deepseek_v32.attention": (
        Edit(
            "DeepseekV32Attention._sparse_indexer_and_attn",
            m.SaveMatchedNode(
                _call("cat", m.Tuple([m.Element(m.Name("q_nope")), m.DoNotCare()])),
                CHANGED,
            ),
            lambda _: cst.parse_expression("self.impl.mha_query(q_nope, mha_q_pe)"),
        ),
    ),
    "vllm.models.deepseek_v32.common.kernels": (
        Edit(
            "fused_q",
            m.SaveMatchedNode(_call("empty_like", m.Name("q_pe")), CHANGED),
            _in_place_for_mha,
        ),
    ),
    "vllm.vllm_flash_attn.cute.flash_fwd_sm100": (
        Edit(
            "FlashAttentionForwardSm100.softmax_loop",
            _CALLBACK_ALONE,
            lambda call: _with_argument(call, "mask_causal", "False"),
        ),
    ),
    "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl": (
        Edit(
            "is_fused_q_cutedsl_supported",
            _LEAST_CAPABILITY,
            lambda _: cst.parse_expression("90 if envs.VLLM_SPARSE_MLA_SM90 else 100"),
            imports=("import vllm.envs as envs",),
        ),
        Edit(
            "FusedQKernel.compile",
            _KERNEL_CLASS,
            lambda _: cst.parse_expression("for_this_device(FusedQKernel)"),
            imports=(
                "from vllm.models.deepseek_v32.nvidia.ops.fused_q_sm90 "
                "import for_this_device",
            ),
        ),
    ),
    # FA4 caches kernels on disk by its files as they lie there: an edit changes none.
    "vllm.vllm_flash_attn.cute.cache_utils": (
        Edit(
            "_compute_source_fingerprint",
            m.SaveMatchedNode(_NEW_DIGEST, CHANGED),
            _with_digest_of_edits,
            exported=False,
        ),
    ),
}

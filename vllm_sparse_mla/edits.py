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

from vllm_sparse_mla.overlay import overlay_root

#: Under this name a pattern saves the node that an edit changes.
CHANGED = "changed"


@dataclass(frozen=True)
class Edit:
    """A change of one expression."""

    function: str  # qualified name, such as ``Class.method``, also of a constant
    # Matches exactly one node inside the definition, and saves the expression to change
    # as ``CHANGED``.
    pattern: m.BaseMatcherNode
    # Returns what that expression becomes, on as many lines.
    change: Callable[[cst.CSTNode], cst.CSTNode]
    # Statements that it needs at the top of the file; not for a module that may be
    # edited where it is (``guard.EditedFile.keeps_name``).
    imports: tuple[str, ...] = ()
    # A call of what the declared type of its object has not, which the patch tells
    # mypy.
    untyped: str = ""
    exported: bool = True  # whether the patch has it too


def apply_edits(text: str, edits: Sequence[Edit], moves_lines: bool = False) -> str:
    """Apply edits to a file; every line keeps its number, unless they may move lines.

    Raises:
        ValueError: if the file has not exactly one such function or expression, or an
            edit would move lines, or there is no blank line for an import.
    """
    tree = cst.parse_module(text)
    for edit in edits:
        nodes = _find_nodes(tree, edit.function)
        matches = m.extractall(nodes[-1], edit.pattern)
        if len(matches) != 1:
            raise ValueError(
                f"an edit of {edit.function} must match once, and matches "
                f"{len(matches)} times"
            )
        old = matches[0][CHANGED]
        new = edit.change(old)
        if not moves_lines and _lines(tree, new) != _lines(tree, old):
            raise ValueError(f"an edit of {edit.function} moves lines")
        tree = _with_function(tree, nodes, nodes[-1].deep_replace(old, new))
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


def _find_nodes(tree: cst.Module, name: str) -> list[cst.CSTNode]:
    """The definition of that name, behind the classes that it is in."""
    paths: list[list[cst.CSTNode]] = [[]]
    for part in name.split("."):
        named = m.Name(part)
        constant = m.Assign(targets=[m.AssignTarget(named)])
        definition = (
            m.FunctionDef(named) | m.ClassDef(named) | m.SimpleStatementLine([constant])
        )
        bodies = [(path, path[-1].body if path else tree) for path in paths]
        paths = [
            [*path, node]
            for path, block in bodies
            for node in block.body
            if m.matches(node, definition)
        ]
    if len(paths) != 1:
        raise ValueError(f"expected one {name}, found {len(paths)}")
    return paths[0]


def _with_function(
    tree: cst.Module, nodes: Sequence[cst.CSTNode], new: cst.CSTNode
) -> cst.Module:
    """The file with another last one of the nodes; visits nothing beside them."""

    def within(block: cst.CSTNode) -> cst.CSTNode:
        body = [new if node is old else node for node in block.body]
        return block.with_changes(body=body)

    *classes, old = nodes
    for cls in reversed(classes):
        old, new = cls, cls.with_changes(body=within(cls.body))
    return within(tree)


def saved(pattern: m.BaseMatcherNode) -> m.BaseMatcherNode:
    """The pattern, what it matches being what an edit changes."""
    return m.SaveMatchedNode(pattern, CHANGED)


def appended(items: Sequence[cst.CSTNode], added: cst.CSTNode) -> list[cst.CSTNode]:
    """Arguments, parameters or names with one more, on the line of the last."""
    *first, last = items
    space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [
        *first,
        last.with_changes(comma=space),
        added.with_changes(comma=last.comma),
    ]


def _with_arguments(call: cst.Call, arguments: str) -> cst.Call:
    """The call with more keyword arguments at its end."""
    items = call.args
    for added in cst.parse_expression(f"f({arguments})").args:
        items = appended(items, added)
    return call.with_changes(args=items)


def _with_parameter(parameters: cst.Parameters, parameter: str) -> cst.Parameters:
    """The parameters with one more that has a default."""
    (added,) = cst.parse_statement(f"def f({parameter}): pass").params.params
    return parameters.with_changes(params=appended(parameters.params, added))


def _with_mask_fn(function: str) -> m.Call:
    """A call of a function that gets a partial of the mask's application, or may."""
    partial = saved(m.Call(m.Name("partial")))
    mask_fn = m.Arg(partial | m.IfExp(body=partial), keyword=m.Name("mask_fn"))
    return m.Call(m.Name(function), [m.ZeroOrMore(), mask_fn, m.ZeroOrMore()])


# The block of a loop that applies a callback, if there is one, and else no mask at all:
# no key of its blocks lies behind the diagonal.
_CALLBACK_ALONE = m.If(
    test=m.Call(
        m.Name("const_expr"),
        [m.Arg(m.Comparison(m.Attribute(m.Name("self"), m.Name("mask_mod"))))],
    ),
    body=m.IndentedBlock(
        [m.SimpleStatementLine([m.Assign(value=_with_mask_fn("softmax_step"))])]
    ),
)

_VECTOR_MASK_MOD = "vector_mask_mod"
_COLUMN_ALIGNMENT = cst.Element(cst.SimpleString('"__column_alignment__"'))
_PARAMETERS = saved(m.Parameters([m.Param(m.Name("self")), m.AtLeastN(n=1)]))
_TOO_WIDE = saved(
    m.Comparison(
        m.Attribute(m.Name("self"), m.Name("mask_vec_size")),
        [m.ComparisonTarget(m.GreaterThan())],
    )
)
_SUPER_INIT = saved(m.Call(m.Attribute(m.Call(m.Name("super")), m.Name("__init__"))))
_MASK_FN = saved(
    m.Call(
        m.Name("partial"),
        [m.Arg(m.Attribute(attr=m.Name("apply_mask"))), m.AtLeastN(n=1)],
    )
)


def _unless_it_takes_vectors(test: cst.Comparison) -> cst.BaseExpression:
    name = cst.parse_expression(f"not {_VECTOR_MASK_MOD}")
    return cst.BooleanOperation(test, cst.And(), name)


def _taking_vectors(call: cst.Call) -> cst.Call:
    """The call with the new parameter before its ``**kwargs``."""
    *first, kwargs = call.args
    added = cst.parse_expression(f"f({_VECTOR_MASK_MOD}=True, )").args
    return call.with_changes(args=[*first, *added, kwargs])


_NEW_DIGEST = m.Call(m.Attribute(m.Name("hashlib"), m.Name("sha256")), [])


def _with_digest_of_edits(call: cst.Call) -> cst.Call:
    """The new digest with this file, and what is overlaid in FA4, in it."""
    files = [
        Path(__file__),
        *sorted(overlay_root().glob("vllm/vllm_flash_attn/**/*.py")),
    ]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return call.with_changes(args=[cst.Arg(cst.SimpleString(f'b"{digest}"'))])


def _ask_layer(call: cst.Call) -> cst.Call:
    """What the table admits goes through a question to the layer."""
    question = "self.impl.masked_mha_pays(self, attn_metadata, x)"
    asked = cst.parse_expression(question)
    return asked.with_deep_changes(asked.args[-1], value=call)


_LEAST_CAPABILITY = m.Call(
    m.Attribute(m.Name("current_platform"), m.Name("has_device_capability")),
    [m.Arg(saved(m.Integer("100")))],
)
_KERNEL_CLASS = m.Assign(
    [m.AssignTarget(m.Name("kernel"))],
    m.Call(saved(m.Name("FusedQKernel"))),
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
    return cst.parse_expression(text).with_changes(orelse=new)


# The loop over the blocks that need no mask but a callback.
_REST_OF_BLOCKS = m.For(
    iter=m.Call(
        args=[
            m.Arg(m.BinaryOperation(right=m.Name("n_block_min_before_local_mask"))),
            m.ZeroOrMore(),
        ]
    ),
    body=m.IndentedBlock(
        [
            m.SimpleStatementLine([m.Assign(value=_with_mask_fn("mma_one_n_block"))]),
            m.ZeroOrMore(),
        ]
    ),
)


def _without_diagonal(call: cst.Call) -> cst.Call:
    return _with_arguments(call, "mask_causal=False")


_FA4 = "vllm.vllm_flash_attn.cute"

#: FA4: no diagonal below the diagonal.
DIAGONAL_EDITS: dict[str, tuple[Edit, ...]] = {
    f"{_FA4}.flash_fwd_sm100": (
        Edit(
            "FlashAttentionForwardSm100.softmax_loop",
            _CALLBACK_ALONE,
            _without_diagonal,
        ),
    ),
    f"{_FA4}.flash_fwd_sm90": (
        Edit("FlashAttentionForwardSm90.mma", _REST_OF_BLOCKS, _without_diagonal),
    ),
}

#: FA4: vectorised callbacks on SM90, to which ``cute/mask.py`` of the overlay belongs.
VECTOR_EDITS: dict[str, tuple[Edit, ...]] = {
    f"{_FA4}.flash_fwd": (
        Edit(
            "FlashAttentionForwardBase.__init__",
            _PARAMETERS,
            lambda parameters: _with_parameter(
                parameters, f"{_VECTOR_MASK_MOD}: bool = False"
            ),
        ),
        Edit("FlashAttentionForwardBase.__init__", _TOO_WIDE, _unless_it_takes_vectors),
    ),
    f"{_FA4}.flash_fwd_sm90": (
        Edit("FlashAttentionForwardSm90.__init__", _SUPER_INIT, _taking_vectors),
        Edit(
            "FlashAttentionForwardSm90.mma",
            _MASK_FN,
            lambda call: _with_arguments(
                call,
                "vec_size=self.mask_vec_size, "
                "words_ahead=mask.make_words_ahead(thr_mma_qk) if const_expr("
                "self.mask_vec_size > 1 and not self.use_block_sparsity) else None",
            ),
        ),
    ),
    # What a kernel is known by in memory has to hold all that it depends on.
    f"{_FA4}.utils": (
        Edit(
            "_MIXER_ATTRS",
            saved(m.Tuple()),
            lambda names: names.with_changes(
                elements=appended(names.elements, _COLUMN_ALIGNMENT)
            ),
        ),
    ),
}

#: Edits by module.
EDITS: dict[str, tuple[Edit, ...]] = {
    "vllm.model_executor.layers.attention.mla_attention": (
        Edit(
            "MLAAttention._use_sparse_mha",
            saved(m.Call(m.Name("_use_masked_mha"))),
            _ask_layer,
            untyped="self.impl.masked_mha_pays(",
        ),
    ),
    "vllm.models.deepseek_v32.attention": (
        Edit(
            "DeepseekV32Attention._sparse_indexer_and_attn",
            saved(_call("cat", m.Tuple([m.Element(m.Name("q_nope")), m.DoNotCare()]))),
            lambda _: cst.parse_expression("mha_query(q_nope, mha_q_pe)"),
            imports=(
                "from vllm.models.deepseek_v32.common.mha_query import mha_query",
            ),
        ),
    ),
    "vllm.models.deepseek_v32.common.kernels": (
        Edit(
            "fused_q",
            saved(_call("empty_like", m.Name("q_pe"))),
            _in_place_for_mha,
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
    f"{_FA4}.cache_utils": (
        Edit(
            "_compute_source_fingerprint",
            saved(_NEW_DIGEST),
            _with_digest_of_edits,
            exported=False,
        ),
    ),
    **{
        module: DIAGONAL_EDITS.get(module, ()) + VECTOR_EDITS.get(module, ())
        for module in {**DIAGONAL_EDITS, **VECTOR_EDITS}
    },
}

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A file as it was before some of its names were there.

The patches of a series come from one source, the overlay. What a patch adds to a
function of an earlier one hangs on a name that it brings: a call, a branch on a call,
an operand of ``or``. Without that name those are left out here.
"""

from collections.abc import Collection

import libcst as cst
import libcst.matchers as m

from vllm_sparse_mla.export_patch import tree

# What an expression on an absent name is folded to, and its negation.
_ABSENT, _PRESENT = cst.Name("_absent_"), cst.Name("_present_")
_FALSE, _TRUE = m.Name(_ABSENT.value), m.Name(_PRESENT.value)


def without(
    node: cst.CSTNode,
    names: Collection[str],
    members: Collection[str] = (),
    modules: Collection[str] = (),
) -> cst.CSTNode:
    """Leave out what hangs on names that are not there yet.

    An absent name, what is called or looked up on it, and a call that takes it first
    count as false: in ``or``, ``and``, ``not`` and as the test of ``if``. What is
    nothing but such an expression goes: a statement, one that assigns it or to it, an
    element of a tuple or list, a keyword argument.

    Args:
        node: A definition.
        names: Absent names of its file.
        members: Absent attributes, of whatever object.
        modules: Absent modules, from which it may import.

    Raises:
        ValueError: If an absent name stands anywhere else.
    """
    result = node.visit(_Without(names, members, modules))
    if m.findall(result, _FALSE | _TRUE):
        raise ValueError(
            f"{tree.name_of(node)} needs a name of a later patch: {tree.code(result)}"
        )
    return result


class _Without(cst.CSTTransformer):
    def __init__(
        self,
        names: Collection[str],
        members: Collection[str],
        modules: Collection[str],
    ) -> None:
        super().__init__()
        self._names = names
        self._members = members
        self._modules = modules
        self._elifs: set[cst.If] = set()

    def leave_Name(self, old: cst.Name, new: cst.Name) -> cst.Name:
        return _ABSENT if old.value in self._names else new

    def leave_Attribute(
        self, old: cst.Attribute, new: cst.Attribute
    ) -> cst.BaseExpression:
        if old.attr.value in self._members or m.matches(new.value, _FALSE):
            return _ABSENT
        return new.with_changes(attr=old.attr)

    def leave_Call(self, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
        gone = m.Call(_FALSE) | m.Call(args=[m.Arg(_FALSE), m.ZeroOrMore()])
        return _ABSENT if m.matches(new, gone) else new

    def leave_Subscript(
        self, old: cst.Subscript, new: cst.Subscript
    ) -> cst.BaseExpression:
        return _ABSENT if m.matches(new.value, _FALSE) else new

    def leave_UnaryOperation(
        self, old: cst.UnaryOperation, new: cst.UnaryOperation
    ) -> cst.BaseExpression:
        if m.matches(new, m.UnaryOperation(m.Not(), _FALSE)):
            return _PRESENT
        return new

    def leave_BooleanOperation(
        self, old: cst.BooleanOperation, new: cst.BooleanOperation
    ) -> cst.BaseExpression:
        neutral, decisive = _TRUE, _FALSE
        if isinstance(new.operator, cst.Or):
            neutral, decisive = _FALSE, _TRUE
        sides = [new.left, new.right]
        if any(m.matches(side, decisive) for side in sides):
            return _ABSENT if decisive is _FALSE else _PRESENT
        kept = [side for side in sides if not m.matches(side, neutral)]
        if len(kept) == 2:
            return new
        if not kept:
            return _PRESENT if neutral is _TRUE else _ABSENT
        if isinstance(kept[0], cst.BooleanOperation):
            # Its parentheses may be what held it together.
            return kept[0].with_changes(
                lpar=[*new.lpar, *kept[0].lpar], rpar=[*kept[0].rpar, *new.rpar]
            )
        return kept[0]

    def leave_IfExp(self, old: cst.IfExp, new: cst.IfExp) -> cst.BaseExpression:
        if m.matches(new.test, _FALSE):
            return new.orelse
        return new.body if m.matches(new.test, _TRUE) else new

    def leave_Arg(self, old: cst.Arg, new: cst.Arg):
        if old.keyword is not None and m.matches(new.value, _FALSE):
            return cst.RemoveFromParent()
        return new.with_changes(keyword=old.keyword)

    def leave_Param(self, old: cst.Param, new: cst.Param) -> cst.Param:
        return new.with_changes(name=old.name)

    def leave_Element(self, old: cst.Element, new: cst.Element):
        return cst.RemoveFromParent() if m.matches(new.value, _FALSE) else new

    def leave_ImportFrom(self, old: cst.ImportFrom, new: cst.ImportFrom):
        if tree.code(old.module) in self._modules:
            return cst.RemoveFromParent()
        names = [
            alias for alias in old.names if alias.evaluated_name not in self._names
        ]
        if not names:
            return cst.RemoveFromParent()
        names[-1] = names[-1].with_changes(comma=old.names[-1].comma)
        return old.with_changes(names=names)

    def leave_SimpleStatementLine(
        self, old: cst.SimpleStatementLine, new: cst.SimpleStatementLine
    ):
        gone = m.Expr(_FALSE) | m.Assign(value=_FALSE) | m.AnnAssign(value=_FALSE)
        gone |= m.Assign([m.AssignTarget(_FALSE)]) | m.AnnAssign(target=_FALSE)
        kept = [statement for statement in new.body if not m.matches(statement, gone)]
        if not kept and old.body:
            return cst.RemoveFromParent()
        return new.with_changes(body=kept)

    def visit_If(self, node: cst.If) -> None:
        if isinstance(node.orelse, cst.If):
            self._elifs.add(node.orelse)

    def leave_If(self, old: cst.If, new: cst.If):
        empty = not new.body.body and new.orelse is None
        if not (m.matches(new.test, _FALSE | _TRUE) or empty):
            return new
        taken = new if m.matches(new.test, _TRUE) else new.orelse
        if old in self._elifs:
            if taken is new:
                return cst.Else(body=new.body, leading_lines=new.leading_lines)
            return taken or cst.RemoveFromParent()
        if taken is None or empty:
            return cst.RemoveFromParent()
        if isinstance(taken, cst.If) and taken is not new:
            return taken.with_changes(leading_lines=new.leading_lines)
        first, *others = taken.body.body
        first = first.with_changes(
            leading_lines=[*new.leading_lines, *first.leading_lines]
        )
        return cst.FlattenSentinel([first, *others])

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The splice engine on small files: where each kind of definition lands."""

import textwrap

import pytest

from vllm_sparse_mla.export_patch import tidy
from vllm_sparse_mla.export_patch.splice import Definition, Rules, splice

UPSTREAM = '''\
"""Upstream's docstring."""

import math
from typing import Any

from pkg.base import Base, helper

LIMIT = 1


def first(x):
    return math.floor(x)


# Adjoining comment.
@helper
def second(x):
    return x


second.width = 32


class Impl(Base):
    """Upstream's class."""

    flag: Any = None

    def run(self):
        return first(1)

    @staticmethod
    def spare():
        return 0

    def last(self):
        return 2
'''


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def spliced(overlay: str, **rules) -> str:
    return splice(dedent(overlay), UPSTREAM, Rules(**rules)).text


def test_an_unchanged_definition_changes_nothing():
    result = splice("LIMIT = 1\n", UPSTREAM)
    assert result.text == UPSTREAM
    assert result.definitions == ()


def test_function_is_replaced_whole_with_decorators_and_comments():
    text = spliced(
        """
        LIMIT = 1


        # Another comment.
        def second(x):
            return -x  # negated
        """
    )
    old = "# Adjoining comment.\n@helper\ndef second(x):\n    return x\n"
    new = "# Another comment.\ndef second(x):\n    return -x  # negated\n"
    assert text == UPSTREAM.replace(old, new).replace("Base, helper", "Base")


def test_new_definitions_follow_their_predecessor_in_the_overlay():
    text = spliced(
        """
        import math


        def first(x):
            return math.ceil(x)


        STEP = 2


        def between(x):
            return x + STEP
        """
    )
    new = "math.ceil(x)\n\n\nSTEP = 2\n\n\ndef between(x):\n    return x + STEP\n"
    assert text == UPSTREAM.replace("math.floor(x)\n", new)


def test_leading_new_definitions_stand_above_the_first_replaced_one():
    text = spliced(
        """
        ALIGN = 16

        # In bytes.
        LIMIT = 2 * ALIGN
        """
    )
    new = "ALIGN = 16\n\n# In bytes.\nLIMIT = 2 * ALIGN\n"
    assert text == UPSTREAM.replace("LIMIT = 1\n", new)


def test_attribute_of_a_function_is_a_definition_of_its_own():
    result = splice(
        "def second(x):\n    return x\n\n\nsecond.width = 128\nsecond.step = 1\n",
        UPSTREAM,
    )
    assert "\n\nsecond.width = 128\nsecond.step = 1\n\n\nclass" in result.text
    assert [d.name for d in result.definitions] == [
        "second",
        "second.width",
        "second.step",
    ]


METHODS = """
    from pkg import _upstream_mod as _upstream


    class Impl(_upstream.Impl):
        \"\"\"The overlay's class.\"\"\"

        def _prepare(self):
            return _upstream.LIMIT

        def run(self):
            return self._prepare() + _upstream.first(2)

        def _finish(self):
            return super().finish()
"""


def test_methods_go_into_upstreams_class():
    result = splice(dedent(METHODS), UPSTREAM)
    new = dedent(
        """
        class Impl(Base):
            \"\"\"Upstream's class.\"\"\"

            flag: Any = None

            def _prepare(self):
                return LIMIT

            def run(self):
                return self._prepare() + first(2)

            def _finish(self):
                return super().finish()

            @staticmethod
        """
    )
    start = UPSTREAM.index("class Impl")
    stop = UPSTREAM.index("    def spare")
    assert result.text == UPSTREAM[:start] + new + UPSTREAM[stop:]
    assert result.definitions == (
        Definition("Impl._prepare", "new"),
        Definition("Impl.run", "replaced"),
        Definition("Impl._finish", "new"),
    )


def test_class_of_its_own_is_replaced_whole():
    text = spliced("class Impl:\n    pass\n")
    assert text.endswith("second.width = 32\n\n\nclass Impl:\n    pass\n")
    assert "Any" not in text


def test_removed_definitions_leave_no_gap():
    text = spliced("LIMIT = 1\n", removed=("Impl.spare",))
    old = "    @staticmethod\n    def spare():\n        return 0\n\n"
    assert text == UPSTREAM.replace(old, "")


def test_removing_what_upstream_lacks_is_refused():
    with pytest.raises(ValueError, match=r"Impl\.gone is to be removed"):
        spliced("LIMIT = 1\n", removed=("Impl.gone",))


WRAPPER = """
    from pkg import _upstream_mod as _upstream

    _Theirs = _upstream.Impl


    class Impl(_Theirs):
        def run(self, fast=False):
            if fast:
                return 0
            return _Theirs.run(self, fast)
"""


def test_wrapped_method_keeps_its_body_under_a_new_name():
    result = splice(dedent(WRAPPER), UPSTREAM, Rules({"Impl.run": "_run_slowly"}))
    new = (
        "    def run(self, fast=False):\n"
        "        if fast:\n"
        "            return 0\n"
        "        return self._run_slowly(fast)\n"
        "\n"
        "    def _run_slowly(self):\n"
    )
    assert result.text == UPSTREAM.replace("    def run(self):\n", new)
    assert result.definitions == (Definition("Impl.run", "wrapped"),)


@pytest.mark.parametrize(
    "overlay",
    [
        pytest.param(WRAPPER, id="undeclared-wrapper"),
        pytest.param(WRAPPER.replace("_Theirs.run(self, ", "super().run("), id="super"),
        pytest.param(
            """
            from pkg import _upstream_mod as _upstream


            def first(x):
                return _upstream.first(x) + 1
            """,
            id="function",
        ),
    ],
)
def test_calling_what_one_replaces_is_refused(overlay):
    with pytest.raises(ValueError, match="called by the overlay that replaces it"):
        spliced(overlay)


def test_super_past_upstreams_class_becomes_plain_super():
    text = spliced(
        """
        from pkg import _upstream_mod as _upstream


        class Impl(_upstream.Impl):
            def run(self):
                return super(_upstream.Impl, self).run()
        """
    )
    old = "        return first(1)\n"
    assert text == UPSTREAM.replace(old, "        return super().run()\n")


def test_statement_without_a_name_is_refused():
    with pytest.raises(ValueError, match="the overlay: only definitions.*got 'print"):
        spliced("print(1)\n")


def test_docstring_is_the_overlays_only_if_it_defines_everything():
    partial = '"""New."""\n\nLIMIT = 2\n'
    assert spliced(partial).startswith('"""Upstream\'s docstring."""')
    upstream = "# Header\n\nimport math\n\nLIMIT = math.pi\n"
    text = splice(partial, upstream).text
    assert text == '# Header\n"""New."""\n\nLIMIT = 2\n'


def test_imports_come_and_go_with_what_uses_them():
    text = spliced(
        """
        import abc
        from collections.abc import Callable
        from typing import TypeVar

        import zlib

        from pkg.base import Other, Unused


        def first(x: Callable):
            return abc.f(zlib.g(TypeVar), Other)
        """
    )
    head = text[: text.index("LIMIT")]
    assert head == dedent(
        """
        \"""Upstream's docstring.\"""

        import abc
        import zlib
        from collections.abc import Callable
        from typing import Any, TypeVar

        from pkg.base import Base, Other, helper

        """
    )


def test_order_of_imports_is_kept_where_upstream_does_not_sort_them():
    upstream = "import enum, abc\nfrom a import b\n\nx = (enum,  abc, b)\n"
    overlay = "import math\nfrom a import c\n\ny = math.f(c)\nx = (enum, abc, b)\n"
    expected = upstream.replace("import enum", "import math\nimport enum")
    expected = expected.replace("import b", "import b, c")
    expected = expected.replace("x = (enum,  ", "y = math.f(c)\n\nx = (enum, ")
    assert splice(overlay, upstream, Rules(formatted=False)).text == expected


def test_one_name_for_two_things_is_refused():
    with pytest.raises(ValueError, match="Any is other.Any in the overlay and typing"):
        spliced("from other import Any\n\nLIMIT = Any\n")


def test_two_spellings_of_one_import_are_one():
    upstream = "import a.b.c as c\nfrom typing import Callable\n\nx = (c, Callable)\n"
    overlay = "from collections.abc import Callable\n\nfrom a.b import c\n\n"
    text = splice(overlay + "x = [c, Callable]\n", upstream).text
    assert text.count("import") == 2 and "[c, Callable]" in text


def test_a_part_of_the_definitions_can_be_taken():
    overlay = dedent(METHODS) + "\n\ndef second(x):\n    return 0\n"
    result = splice(overlay, UPSTREAM, wanted=lambda name: name == "Impl._prepare")
    assert [d.name for d in result.definitions] == ["Impl._prepare"]
    old = "    def run(self):\n        return first(1)\n"
    new = "    def _prepare(self):\n        return LIMIT\n\n"
    assert result.text == UPSTREAM.replace(old, new + old)


def test_without_ruff_the_export_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tidy, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'vllm-sparse-mla\[export\]'"):
        spliced("LIMIT = 2\n")

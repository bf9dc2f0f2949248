# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merging of imports in isort's order."""

import pytest

from vllm_sparse_mla.export_patch.imports import bindings, merge_imports

UPSTREAM = """\
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils import (
    PIN_MEMORY,
    to_pinned,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CODE = (math, np, torch, init_logger, PIN_MEMORY, to_pinned)


def f(x: "VllmConfig"): ...
"""


def merged(wanted: str, code: str, upstream: str = UPSTREAM) -> str:
    text = upstream[: upstream.index("CODE")] + code + "\n"
    result = merge_imports(text, bindings(wanted), upstream, width=88)
    return result[: result.index(code)]


def test_nothing_wanted_and_nothing_used_leaves_nothing():
    assert merged("", "pass").strip() == ""


@pytest.mark.parametrize(
    ("wanted", "use", "line", "below"),
    [
        pytest.param("import abc", "abc", "import abc", "import math", id="first"),
        pytest.param(
            "import zlib", "zlib", "import zlib", "from typing", id="before-from"
        ),
        pytest.param(
            "from torch import nn", "nn", "from torch import nn", "", id="section-end"
        ),
        pytest.param(
            "from vllm.attention import a", "a", "from vllm.attention import a",
            "from vllm.logger", id="first-party",
        ),
    ],
)  # fmt: skip
def test_new_statement_is_placed_in_order(wanted, use, line, below):
    code = UPSTREAM[UPSTREAM.index("CODE") :].replace("torch,", f"torch, {use},")
    lines = merged(wanted, code).split("\n")
    assert lines[lines.index(line) + 1].startswith(below)


def test_name_joins_a_statement_of_the_same_module():
    code = UPSTREAM[UPSTREAM.index("CODE") :].replace("torch,", "torch, Thing, ABC,")
    text = merged("from vllm.utils import ABC, Thing", code)
    assert "import (\n    ABC,\n    PIN_MEMORY,\n    Thing,\n    to_pinned,\n)" in text


def test_unused_names_go_and_what_was_unused_before_stays():
    upstream = UPSTREAM.replace("import math\n", "import math\nimport os\n")
    code = UPSTREAM[UPSTREAM.index("CODE") :]
    code = code.replace("np, ", "").replace(", to_pinned", "")
    text = merged("", code, upstream)
    assert "import numpy" not in text
    assert "import os" in text
    assert "from vllm.utils import PIN_MEMORY\n" in text
    assert "VllmConfig" in text


def test_guarded_name_becomes_a_plain_import_when_code_needs_it():
    code = UPSTREAM[UPSTREAM.index("CODE") :].replace("torch,", "torch, VllmConfig,")
    text = merged("from vllm.config import VllmConfig", code)
    assert text.count("import VllmConfig") == 1
    assert "TYPE_CHECKING" not in text


def test_one_name_for_two_things_is_refused():
    code = UPSTREAM[UPSTREAM.index("CODE") :]
    with pytest.raises(ValueError, match="torch is other.torch in the overlay"):
        merged("from other import torch", code)


def test_two_spellings_of_one_import_are_one():
    upstream = (
        "import a.b.c as c\nfrom typing import Callable\n\nCODE = (c, Callable)\n"
    )
    wanted = "from collections.abc import Callable\nfrom a.b import c\n"
    code = "CODE = [c, Callable]"
    assert merged(wanted, code, upstream) == upstream[: upstream.index("CODE")]

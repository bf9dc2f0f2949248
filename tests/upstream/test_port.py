# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests rewritten for upstream's repository: imports and markers."""

from vllm_sparse_mla.export_patch.port import PortedTest, port_test

OURS = '''\
"""Docstring."""

import pytest

from vllm.platforms import current_platform
from vllm_sparse_mla.testing.reference import unpack_topk_mask

pytestmark = [pytest.mark.stock_fails("a")]

LIMIT = 1

REASON = "a reason"


@pytest.mark.gpu
@pytest.mark.stock_fails(
    REASON
)
@pytest.mark.parametrize(
    "n",
    [
        1,
        pytest.param(2, id="2", marks=pytest.mark.stock_fails("b")),
        pytest.param(3, id="3", marks=pytest.mark.grid),
    ],
)
def test_a(n):
    assert unpack_topk_mask, current_platform
'''

UPSTREAMS = '''\
"""Docstring."""

import pytest
import torch

from tests.v1.attention.sparse_mla.sparse_mla_reference import unpack_topk_mask
from vllm.platforms import current_platform

requires_nvidia = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)

LIMIT = 1


@requires_nvidia
@pytest.mark.parametrize(
    "n",
    [
        1,
        pytest.param(2, id="2"),
        pytest.param(3, id="3", marks=pytest.mark.slow_test),
    ],
)
def test_a(n):
    assert unpack_topk_mask, current_platform
'''


def test_imports_and_markers_become_upstreams():
    assert port_test(OURS).text == UPSTREAMS


def test_the_marker_of_a_grid_becomes_upstreams_wherever_it_is():
    text = "import pytest\n\n{0} = [pytest.mark.{1}]\n\n\n{2}def test_a():\n    pass\n"
    for name, decorator in (("pytestmark", ""), ("MARKS", "@pytest.mark.{1}\n")):
        ours, theirs = (
            text.replace("{0}", name).replace("{2}", decorator).replace("{1}", marker)
            for marker in ("grid", "slow_test")
        )
        assert port_test(ours).text == theirs


def test_module_import_keeps_its_name():
    text = "from vllm_sparse_mla.testing import reference as oracle\n\noracle.f()\n"
    expected = (
        "from tests.v1.attention.sparse_mla import sparse_mla_reference as oracle\n"
    )
    assert port_test(text).text.startswith(expected)


def test_file_about_the_plugin_is_left_out():
    text = "from vllm_sparse_mla.plugin import register\n"
    assert port_test(text).text is None


def test_function_about_the_plugin_is_left_out_with_what_only_it_used():
    kept = "import sys\n\n\ndef test_a():\n    assert sys\n"
    text = kept.replace("import sys", "import os\nimport sys") + (
        "\n\n# A comment.\ndef test_b():\n    os.system('import vllm_sparse_mla')\n"
    )
    assert port_test(text) == PortedTest(kept, ("test_b",))


def test_marker_elsewhere_stays():
    text = 'import pytest\n\nMARKS = [pytest.mark.stock_fails("a")]\n'
    assert port_test(text).text == text

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tests rewritten for upstream's repository: imports and markers."""

import pytest

from vllm_sparse_mla.export_patch.suite import exported_test

OURS = '''\
"""Docstring."""

import pytest

from vllm.platforms import current_platform
from vllm_sparse_mla.reference import unpack_topk_mask

pytestmark = [pytest.mark.interpreter]

LIMIT = 1

REASON = "a reason"


@pytest.mark.gpu
@pytest.mark.stock_fails(
    REASON
)
@pytest.mark.parametrize("n", [1, pytest.param(2, id="2", marks=pytest.mark.stock_fails("b"))])
def test_a(n):
    assert unpack_topk_mask
'''  # noqa: E501

UPSTREAMS = '''\
"""Docstring."""

import pytest
import torch

from tests.v1.attention.sparse_mla_reference import unpack_topk_mask
from vllm.platforms import current_platform

LIMIT = 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("n", [1, pytest.param(2, id="2")])
def test_a(n):
    assert unpack_topk_mask
'''


def test_imports_and_markers_become_upstreams():
    assert exported_test(OURS, "test_a.py") == UPSTREAMS


def test_module_import_keeps_its_name():
    text = "from vllm_sparse_mla import reference as oracle\n\noracle.f()\n"
    expected = "from tests.v1.attention import sparse_mla_reference as oracle\n"
    assert exported_test(text, "test_a.py").startswith(expected)


def test_any_other_import_of_this_package_is_refused():
    text = "from vllm_sparse_mla.plugin import register\n"
    with pytest.raises(ValueError, match="test_a.py must import nothing.*plugin"):
        exported_test(text, "test_a.py")


def test_marker_in_an_unknown_place_is_refused():
    text = "import pytest\n\nMARKS = [pytest.mark.stock_fails('a')]\n"
    with pytest.raises(ValueError, match="must use pytest.mark.stock_fails"):
        exported_test(text, "test_a.py")

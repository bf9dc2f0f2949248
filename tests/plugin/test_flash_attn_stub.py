# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stand-in for vLLM's FlashAttention package where libcuda is missing."""

import importlib.util
import sys
from pathlib import Path

import pytest

import vllm
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

NAME = "vllm.vllm_flash_attn"


@pytest.fixture
def without_libcuda(monkeypatch):
    """The package refuses to import, as where its extensions do not load."""
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.setattr(vllm, "vllm_flash_attn", None, raising=False)


def test_sources_below_the_stand_in_are_found(without_libcuda):
    module = install_parent_module()
    assert sys.modules[NAME] is vllm.vllm_flash_attn is module
    spec = importlib.util.find_spec(f"{NAME}.cute")
    assert (
        Path(spec.origin).parent == Path(vllm.__file__).parent / "vllm_flash_attn/cute"
    )


def test_further_calls_change_nothing(without_libcuda):
    assert install_parent_module() is install_parent_module()


def test_the_real_package_is_preferred(monkeypatch):
    real = type(sys)(NAME)
    monkeypatch.setitem(sys.modules, NAME, real)
    assert install_parent_module() is real

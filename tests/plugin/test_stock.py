# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Upstream's files can be run beside the overlay."""

import importlib
from pathlib import Path

import pytest

from vllm_sparse_mla.testing.stock import load_file, load_stock_module

LAYER = "vllm.model_executor.layers.attention.sparse_mla_attention"


def test_the_installed_file_is_run_and_the_overlay_left_alone():
    overlaid = importlib.import_module(LAYER)
    stock = load_stock_module(LAYER)
    assert stock is load_stock_module(LAYER)
    assert stock is not overlaid
    assert importlib.import_module(LAYER) is overlaid
    # A definition that only the overlay has, and one of upstream's that it replaces.
    assert not hasattr(stock, "MASKED_MHA_MODEL_DIMS")
    assert stock._topk_mask_shape is not overlaid._topk_mask_shape


def test_a_missing_file_is_named(tmp_path: Path):
    path = tmp_path / "none.py"
    with pytest.raises(ValueError, match="path must name a Python file, got .*none.py"):
        load_file(path)

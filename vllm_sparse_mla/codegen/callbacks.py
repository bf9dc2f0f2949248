# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Finds the callback of a variant. Imports CUTLASS: for the worker."""

import importlib
from collections.abc import Callable
from pathlib import Path

from vllm_sparse_mla.codegen.variants import Variant
from vllm_sparse_mla.testing.stock import load_file, load_stock_module

_MASK_MODULE = "vllm.model_executor.layers.attention.sparse_mla_mask"
_FUNCTION = {"dense": "dense_mask_mod", "offset": "offset_dense_mask_mod"}


def load_callback(variant: Variant) -> Callable | None:
    """Return the callback that ``variant`` names, None for the unmasked kernel.

    Raises:
        ValueError: if the file has no such function.
        RuntimeError: if this project's callbacks are asked for, and the overlay is not
            made for the installed vLLM.
    """
    name = variant.callback
    if name == "none":
        return None
    if name.startswith("word32"):
        module = importlib.import_module("vllm_sparse_mla.codegen.word_callbacks")
        function = "scalar_mask_mod" if name == "word32_scalar" else "word_mask_mod"
    elif name in _FUNCTION:
        put_overlay_in_force()
        module, function = importlib.import_module(_MASK_MODULE), _FUNCTION[name]
    elif name.startswith("stock_"):
        module = load_stock_module(_MASK_MODULE)
        function = _FUNCTION[name.removeprefix("stock_")]
    else:
        put_overlay_in_force()
        file, _, function = name.rpartition(":")
        module = load_file(Path(file))
    callback = getattr(module, function, None)
    if callback is None:
        raise ValueError(
            f"callback must name a function of {module.__file__}, got {function!r}"
        )
    return callback


def put_overlay_in_force() -> None:
    """Serve this project's modules, or fail: never compile stock code as ours.

    Raises:
        RuntimeError: see ``vllm_sparse_mla.plugin.register``, in strict mode.
    """
    from vllm_sparse_mla.overlay import active_finder
    from vllm_sparse_mla.plugin import register

    register()
    if active_finder() is None:
        raise RuntimeError("the overlay is not in force; see the log of the worker")

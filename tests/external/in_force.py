# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plugin of pytest for other people's tests: what has to be there before they import.

The overlay, where the variant of external.py asks for it; FA4 under the name that its
own tests know; and on a machine without a GPU what this project's tests have there too.
"""

import importlib
import os
import pkgutil
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch

from vllm_sparse_mla import overlay
from vllm_sparse_mla.plugin import register
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

VARIANT = os.environ["EXTERNAL"]
FA4 = "vllm.vllm_flash_attn.cute"


def _stand_in_for_tblib() -> None:
    # vLLM's conftest has it for exceptions of tests that run in processes of their own.
    if find_spec("tblib") is None:
        tblib = ModuleType("tblib", "Stand-in for what pickles tracebacks.")
        tblib.pickling_support = SimpleNamespace(install=lambda: None)
        sys.modules["tblib"] = tblib


def _alias_fa4() -> None:
    """Lets ``flash_attn.cute`` be the FA4 inside vLLM, module by module."""
    flash_attn = ModuleType("flash_attn", "Parent of the alias.")
    flash_attn.cute = importlib.import_module(FA4)
    sys.modules |= {"flash_attn": flash_attn, "flash_attn.cute": flash_attn.cute}
    for module in pkgutil.iter_modules(flash_attn.cute.__path__):
        try:
            found = importlib.import_module(f"{FA4}.{module.name}")
        except ImportError:
            continue  # what a kernel of another device or a benchmark imports
        sys.modules[f"flash_attn.cute.{module.name}"] = found


if not torch.cuda.is_available():
    import vllm.utils.torch_utils

    vllm.utils.torch_utils.PIN_MEMORY = False
    install_parent_module()
if VARIANT != "stock":
    register()
_stand_in_for_tblib()
if os.path.isdir("tests/cute"):
    _alias_fa4()


def pytest_sessionfinish() -> None:
    """Whatever ran, ran in the variant that was asked for."""
    assert (overlay.active_finder() is None) == (VARIANT == "stock")

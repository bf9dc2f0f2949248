# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes ``vllm.vllm_flash_attn.cute`` importable on a machine without libcuda."""

import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

_NAME = "vllm.vllm_flash_attn"


def install_parent_module() -> ModuleType:
    """Imports vLLM's FlashAttention package, or stands in for it where it refuses.

    The package raises ImportError where its CUDA extensions do not load, though the
    CuTe DSL sources below it need none of them. The stand-in is an empty package over
    the same folder: ``.cute`` imports below it, and a function to attend with can be
    set on it. Further calls return the module that is there.
    """
    try:
        return importlib.import_module(_NAME)
    except ImportError:
        import vllm

        folder = str(Path(vllm.__file__).parent / "vllm_flash_attn")
        module = ModuleType(_NAME, "Stand-in without the CUDA extensions.")
        spec = importlib.machinery.ModuleSpec(_NAME, None, is_package=True)
        spec.submodule_search_locations = [folder]
        module.__spec__ = spec
        module.__path__ = spec.submodule_search_locations
        sys.modules[_NAME] = module
        vllm.vllm_flash_attn = module
        return module

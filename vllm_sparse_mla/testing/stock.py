# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Loads files of the installed vLLM, whatever stands in for their modules."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def load_stock_module(name: str) -> ModuleType:
    """Execute the own file of a vLLM module, named as it is imported."""
    package, *parts = name.split(".")
    folder = importlib.util.find_spec(package).submodule_search_locations[0]
    return load_file(Path(folder, *parts).with_suffix(".py"))


@cache
def load_file(path: Path) -> ModuleType:
    """Execute a Python file under a private name, once.

    The module in use is not touched, and several files can be compared in one process.

    Raises:
        ValueError: ``path`` is not a Python file.
    """
    name = f"_sparse_mla_{path.stem}_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not path.is_file():
        raise ValueError(f"path must name a Python file, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

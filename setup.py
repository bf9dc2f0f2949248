# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build: the overlay tree goes into the wheel below ``vllm_sparse_mla/_overlay``.

The tree must not be installed as the package ``vllm``, which it overlays.
"""

from pathlib import Path

from setuptools import find_packages, setup

_OVERLAY = "vllm_sparse_mla._overlay"
_FOLDERS = {path.parent for path in Path("vllm").rglob("*.py")}

setup(
    packages=find_packages(include=["vllm_sparse_mla*"])
    + [f"{_OVERLAY}.{'.'.join(folder.parts)}" for folder in sorted(_FOLDERS)],
    package_dir={f"{_OVERLAY}.vllm": "vllm"},
)

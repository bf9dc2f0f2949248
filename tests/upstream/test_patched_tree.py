# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One source, two deliveries: the patched tree passes the overlay's suite.

The tree is the installed vLLM with both patches applied and no plugin. Its tests are
the exported ones, and run from there as upstream's would.
"""

import os
import re
import subprocess
import sys

import pytest

from vllm_sparse_mla.export_patch.diff import patch_text

# What upstream's CI has and this machine may lack: a GPU, or what stands in for one.
# It also checks at the end that the patched files are what ran.
CONFTEST = """
import importlib
import sys
from pathlib import Path

import vllm.utils.torch_utils
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

vllm.utils.torch_utils.PIN_MEMORY = False
install_parent_module()


def pytest_sessionfinish():
    tree = Path(__file__).parents[1]
    for name in ("sparse_mla_attention", "sparse_mla_mask"):
        name = f"vllm.model_executor.layers.attention.{name}"
        module = importlib.import_module(name)
        assert Path(module.__file__).is_relative_to(tree), module
    loaded = {"vllm_sparse_mla.plugin", "vllm_sparse_mla.overlay"} & sys.modules.keys()
    assert not loaded, loaded
"""


@pytest.mark.extra
@pytest.mark.timeout(3000)
def test_patched_tree_passes_the_suite_without_the_plugin(
    vllm_changes, fa4_changes, link_package, git_apply, tmp_path
):
    patched = [c.path for c in vllm_changes if c.before is not None]
    fa4_changes = [c for c in fa4_changes if c.before is not None]
    fa4_paths = {c.path: f"vllm/vllm_{c.path}" for c in fa4_changes}
    new = [c.path for c in vllm_changes if c.path.startswith("vllm/")]
    link_package(tmp_path, [*patched, *new, *fa4_paths.values()])
    folder = tmp_path
    for name in ("tests", "v1", "attention", "sparse_mla"):
        folder /= name
        folder.mkdir()
        (folder / "__init__.py").touch()
    git_apply(tmp_path, patch_text(vllm_changes))
    for change in fa4_changes:
        text = change.after.replace("flash_attn.cute", "vllm.vllm_flash_attn.cute")
        (tmp_path / fa4_paths[change.path]).write_text(text)
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)

    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(tmp_path),
        "TRITON_INTERPRET": "1",
        "VLLM_PLUGINS": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    options = ["--rootdir", str(tmp_path), "-c", os.devnull, "tests/v1/attention"]
    result = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout), result.stdout[-2000:]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The overlay tree: its files, and that a checkout never hides the installed vLLM."""

import ast
from importlib.metadata import distribution
from pathlib import Path

import pytest

import vllm
from vllm_sparse_mla import guard
from vllm_sparse_mla.guard import EDITED_FILES, OVERLAID_FILES

CHECKOUT = Path(__file__).resolve().parents[2]
OVERLAY_DIR = CHECKOUT / "vllm"
PACKAGE_DIR = Path(vllm.__file__).parent


@pytest.mark.parametrize("folder", ["vllm", "tests"])
def test_no_package_marker(folder):
    assert list((CHECKOUT / folder).rglob("__init__.py")) == []


def test_installed_vllm_wins():
    assert CHECKOUT / "vllm" not in Path(vllm.__file__).parents


def test_every_file_of_the_tree_is_in_the_table():
    on_disk = {str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / "vllm").rglob("*.py")}
    assert on_disk == {file.path for file in OVERLAID_FILES}


def test_tables_match_the_published_release():
    assert distribution("vllm").version == guard.VLLM_VERSION
    guard.check_installed(guard.VLLM_VERSION, PACKAGE_DIR)
    assert not guard.RELIED_ON.keys() & {
        f.path_in_package for f in OVERLAID_FILES + EDITED_FILES
    }


# Modules that the overlay imports names from and does not stand on otherwise: a name is
# there when the overlay is loaded, or the import fails.
PLAIN_HELPERS = {
    "config/__init__.py": "the type of a parameter",
    "cute_utils/cvt.py": "conversions of two numbers at a time",
    "envs.py": "environment variables",
    "logger.py": "logging",
    "platforms/__init__.py": "the device's capability",
    "triton_utils/__init__.py": "Triton itself",
    "utils/import_utils.py": "whether the CuTe DSL is installed",
    "utils/math_utils.py": "division that rounds up",
    "utils/platform_utils.py": "the number of multiprocessors",
}


def _imported_files(source: str) -> set[str]:
    """Files of the package that a source imports, wherever in its text."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = _file(whole) is not None
                names.add(whole if is_module else node.module)
    return {_file(name) or name for name in names if name.startswith("vllm.")}


def _file(name: str) -> str | None:
    path = name.replace(".", "/").removeprefix("vllm/").replace("/_upstream_", "/")
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        if any((root / candidate).is_file() for root in (PACKAGE_DIR, OVERLAY_DIR)):
            return candidate
    return None


def test_what_the_overlay_imports_is_overlaid_or_relied_on_or_a_plain_helper():
    imported = set()
    for file in OVERLAID_FILES:
        imported |= _imported_files((CHECKOUT / file.path).read_text())
    overlaid = {file.path_in_package for file in OVERLAID_FILES + EDITED_FILES}
    assert imported - overlaid - guard.RELIED_ON.keys() == set(PLAIN_HELPERS)


def test_fa4_files_that_call_a_callback_in_a_forward_kernel_are_relied_on():
    tables = OVERLAID_FILES + EDITED_FILES
    known = {*guard.RELIED_ON, *(file.path_in_package for file in tables)}
    callers = {
        path.relative_to(PACKAGE_DIR).as_posix()
        for pattern in ("flash_fwd*.py", "*_forward.py")
        for path in (PACKAGE_DIR / "vllm_flash_attn/cute").glob(pattern)
        if "apply_mask" in path.read_text()
    }
    # Sparse MQA's kernel: not the masked path's.
    assert callers - known == {"vllm_flash_attn/cute/flash_fwd_mla_sm100.py"}

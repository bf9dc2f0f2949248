# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which files the patches change, and to what."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from vllm_sparse_mla.edits import EDITS, Edit
from vllm_sparse_mla.export_patch.source import Source
from vllm_sparse_mla.export_patch.splice import Rules
from vllm_sparse_mla.export_patch.suite import UPSTREAM_TESTS, Suite
from vllm_sparse_mla.export_patch.switch import PATH as SWITCH_PATH
from vllm_sparse_mla.export_patch.switch import VARIABLES
from vllm_sparse_mla.guard import (
    EDITED_FILES,
    OVERLAID_FILES,
    VLLM_VERSION,
    EditedFile,
    OverlaidFile,
)
from vllm_sparse_mla.overlay import overlay_root

_RULES = {
    "vllm.model_executor.layers.attention.sparse_mla_attention": Rules(
        # Steps of upstream's forward_mha, and kernels, that the mask builder replaces.
        removed=(
            "_scatter_topk_kernel",
            "_scatter_topk_single_req_kernel",
            "SparseMLACommonImpl._slice_topk_per_req",
            "SparseMLACommonImpl._remap_topk_to_ranges",
            "SparseMLACommonImpl._try_build_global_mask",
        ),
    ),
}


def installed_vllm_root() -> Path:
    """Folder that holds the installed ``vllm`` package.

    Raises:
        ValueError: If none is installed.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ValueError("no vLLM is installed: name its source tree with --upstream")
    return Path(spec.origin).parent.parent


def _read_upstream(root: Path, file: OverlaidFile) -> tuple[str, str]:
    """Upstream's text of an overlaid file, and a warning if it is another version's."""
    path = root / file.path
    if not path.is_file():
        raise ValueError(
            f"--upstream must hold vLLM {VLLM_VERSION}'s {file.path}, and {root} "
            "has no such file"
        )
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    warning = ""
    if digest != file.sha256:
        warning = (
            f"{path} has SHA-256 {digest}, vLLM {VLLM_VERSION} {file.sha256}: read "
            "the patch of this file as one against another version"
        )
    return data.decode(), warning


def _source(root: Path, file: OverlaidFile) -> Source:
    edits: tuple[Edit, ...] = ()
    if isinstance(file, EditedFile):
        edits = tuple(edit for edit in EDITS[file.module] if edit.exported)
        overlay = ""
    else:
        overlay = (overlay_root() / file.path).read_text()
    before, warning = None, ""
    if file.sha256 is not None:
        before, warning = _read_upstream(root, file)
    rules = _RULES.get(file.module, Rules())
    return Source(file.path, before, overlay, rules, edits, warning=warning)


def collect_vllm_sources(root: Path) -> list[Source]:
    """What the overlay makes of vLLM's own files, FlashAttention's excepted.

    Args:
        root: Folder that holds upstream's ``vllm/``, and ``tests/`` in a source tree.

    Raises:
        ValueError: If upstream lacks a file.
    """
    sources = [
        _source(root, file)
        for file in OVERLAID_FILES + EDITED_FILES
        if not file.module.startswith("vllm.vllm_flash_attn.")
    ]
    switches = (root / SWITCH_PATH).read_text()
    sources.append(Source(SWITCH_PATH, switches, switches=tuple(VARIABLES)))
    return sources


def suite_sources(root: Path, suite: Suite) -> list[Source]:
    """The suite's files, and what it adds to test files of upstream's that are there.

    Args:
        root: As for ``collect_vllm_sources``.
        suite: The tests.
    """
    return [
        Source(name, path.read_text() if path.is_file() else None, text)
        for name, text in suite.files.items()
        if (path := root / name).is_file() or name not in UPSTREAM_TESTS
    ]

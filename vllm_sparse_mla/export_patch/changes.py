# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which files the patches change, and to what."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from vllm_sparse_mla.edits import EDITS, apply_edits
from vllm_sparse_mla.export_patch.diff import Change
from vllm_sparse_mla.export_patch.splice import Definition, Rules, splice
from vllm_sparse_mla.export_patch.suite import Suite
from vllm_sparse_mla.export_patch.switch import PATH as SWITCH_PATH
from vllm_sparse_mla.export_patch.switch import declare_switches
from vllm_sparse_mla.export_patch.tidy import tidy
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


def _is_fa4(file: OverlaidFile) -> bool:
    return file.module.startswith("vllm.vllm_flash_attn.")


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


def _overlay_change(root: Path, file: OverlaidFile, rules: Rules) -> Change:
    if isinstance(file, EditedFile):
        before, warning = _read_upstream(root, file)
        edits = [edit for edit in EDITS[file.module] if edit.exported]
        edited = tuple(Definition(edit.function, "edited") for edit in edits)
        after = apply_edits(before, edits)
        if any(edit.imports for edit in edits):
            after = tidy(after, rules.formatted)
        return Change(file.path, before, after, edited, warning)
    overlay = (overlay_root() / file.path).read_text()
    if file.sha256 is None:
        return Change(file.path, None, overlay)
    before, warning = _read_upstream(root, file)
    spliced = splice(overlay, before, rules)
    return Change(file.path, before, spliced.text, spliced.definitions, warning)


def collect_vllm_changes(root: Path, suite: Suite | None) -> list[Change]:
    """Changes of vLLM's own files, FlashAttention's excepted.

    Args:
        root: Folder that holds upstream's ``vllm/``, and ``tests/`` in a source tree.
        suite: Tests to add; None for none.

    Raises:
        ValueError: If upstream lacks a file or has no place for a definition.
    """
    changes = [
        _overlay_change(root, file, _RULES.get(file.module, Rules()))
        for file in OVERLAID_FILES + EDITED_FILES
        if not _is_fa4(file)
    ]
    changes.append(declare_switches((root / SWITCH_PATH).read_text()))
    for name, text in (suite.files if suite else {}).items():
        if not (root / name).is_file():
            changes.append(Change(name, None, text))
            continue
        before = (root / name).read_text()
        spliced = splice(text, before)
        changes.append(Change(name, before, spliced.text, spliced.definitions))
    return changes

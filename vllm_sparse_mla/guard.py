# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which vLLM the overlay is made for, and whether the installed one is it.

An overlaid module stands on the upstream file that it replaces: it re-exports what it
does not define, and inherited code calls its definitions. So the guard compares the
content of those files, not only the version.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_sparse_mla import envs

VLLM_VERSION = "0.33.0"


def _always() -> bool:
    return True


@dataclass(frozen=True)
class OverlaidFile:
    """One file of the overlay tree.

    Attributes:
        module: name under which the file is imported.
        sha256: digest of the upstream file that is replaced; None if upstream has none.
        enabled: whether the file takes part in this process.
    """

    module: str
    sha256: str | None = None
    enabled: Callable[[], bool] = _always

    @property
    def path(self) -> str:
        """Path below the folder that holds the top-level package."""
        return self.module.replace(".", "/") + ".py"

    @property
    def path_in_package(self) -> str:
        """Path below the top-level package."""
        return self.path.partition("/")[2]


OVERLAID_FILES = (
    OverlaidFile(
        "vllm.model_executor.layers.attention.sparse_mla_attention",
        "c2ca75bfe12b33bb26c3ec3d9fe735cd2ddc68c245d6c76788af2632b9528b77",
    ),
    OverlaidFile(
        "vllm.model_executor.layers.attention.sparse_mla_mask",
        "59562acfdd64194009e6b91fb867584a3138a987392d5ba23781c28ab67173aa",
    ),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_sm90"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_warmup"),
    OverlaidFile("vllm.model_executor.kernels.attention.dsa.topk_mask"),
    OverlaidFile("vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl"),
    OverlaidFile(
        "vllm.vllm_flash_attn.cute.mask",
        "ea35a2c9f29d82e8c939a7b161c39bd8bf40c43c702958fbfe074205fe5054e7",
        enabled=envs.sm90,
    ),
)


def enabled_files() -> tuple[OverlaidFile, ...]:
    """The files of the table that this process overlays."""
    return tuple(file for file in OVERLAID_FILES if file.enabled())


def find_mismatch(
    files: Sequence[OverlaidFile], version: str, package_dir: Path
) -> str | None:
    """Compares an installed vLLM with the pinned one.

    Args:
        files: what is to be overlaid.
        version: the installed vLLM's version; a local part ("+cu129") names a build of
            the same source and is not compared.
        package_dir: folder of the installed package.

    Returns:
        What differs, as a sentence without its full stop; None if nothing does.
    """
    if version.partition("+")[0] != VLLM_VERSION:
        return f"vLLM {version} is installed"
    for file in files:
        path = package_dir / file.path_in_package
        if file.sha256 is None:
            if path.exists():
                return f"the installed vLLM {version} already has {path}"
            continue
        if not path.is_file():
            return f"the installed vLLM {version} lacks {path}"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != file.sha256:
            return (
                f"in the installed vLLM {version}, {path} has SHA-256 {found} "
                f"in place of {file.sha256}"
            )
    return None

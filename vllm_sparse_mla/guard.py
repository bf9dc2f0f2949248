# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which vLLM the overlay is made for, and whether the installed one is it.

An overlaid module stands on the upstream file that it replaces: it re-exports what it
does not define, and inherited code calls its definitions. It stands as well on files
that it leaves alone. So the guard compares the content of both kinds, not only the
version.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from vllm_sparse_mla import envs

VLLM_VERSION = "0.33.0"


def _always() -> bool:
    return True


@dataclass(frozen=True)
class OverlaidFile:
    """One file of the overlay tree."""

    module: str  # name under which the file is imported
    # Digest of the upstream file that is replaced; None if upstream has none.
    sha256: str | None = None
    enabled: Callable[[], bool] = _always  # whether the file takes part in this process

    @property
    def path(self) -> str:
        """Path below the folder that holds the top-level package."""
        return self.module.replace(".", "/") + ".py"

    @property
    def path_in_package(self) -> str:
        """Path below the top-level package."""
        return self.path.partition("/")[2]


@dataclass(frozen=True)
class EditedFile(OverlaidFile):
    """One of upstream's files that is loaded with the edits of ``edits.EDITS``.

    The digest also stands for the patterns: in the pinned file each of them matches
    once, and a file in which one does not has another digest.
    """

    # Whether the module goes by the name of upstream's file, though its text differs.
    # torch.compile's cache reads the files of what it traced, so a file has to be
    # there; a name of its own is for those that key what they compile by it.
    keeps_name: bool = False


OVERLAID_FILES = (
    OverlaidFile(
        "vllm.model_executor.layers.attention.sparse_mla_attention",
        "c2ca75bfe12b33bb26c3ec3d9fe735cd2ddc68c245d6c76788af2632b9528b77",
    ),
    OverlaidFile(
        "vllm.model_executor.layers.attention.sparse_mla_mask",
        "59562acfdd64194009e6b91fb867584a3138a987392d5ba23781c28ab67173aa",
    ),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_choice"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_context"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_estimate"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_h200"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_index_sharing"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_kv_cache"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_sm90"),
    OverlaidFile("vllm.model_executor.layers.attention.sparse_mla_warmup"),
    OverlaidFile("vllm.model_executor.kernels.attention.dsa.concat_mla_k"),
    OverlaidFile("vllm.model_executor.kernels.attention.dsa.topk_mask"),
    OverlaidFile("vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl"),
    OverlaidFile("vllm.models.deepseek_v32.common.mha_query"),
    OverlaidFile("vllm.models.deepseek_v32.nvidia.ops.fused_q_sm90"),
    OverlaidFile(
        "vllm.vllm_flash_attn.cute.mask",
        "ea35a2c9f29d82e8c939a7b161c39bd8bf40c43c702958fbfe074205fe5054e7",
        enabled=envs.sm90,
    ),
)

EDITED_FILES = (
    EditedFile(
        "vllm.model_executor.layers.attention.mla_attention",
        "af3300b09fda788591861cff8f59ef2d41b02f17164763647d75f33330406f0d",
        keeps_name=True,
    ),
    EditedFile(
        "vllm.models.deepseek_v32.attention",
        "35e7c3d648d22d753926624296619ec70470cea3d66f9c761109b70ecaab9db1",
    ),
    EditedFile(
        "vllm.models.deepseek_v32.common.kernels",
        "23be4ed95ae476fcb4193c4e253c19fdf4b5ae951c50fedf6a3299f4c25ba25a",
    ),
    EditedFile(
        "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl",
        "807f3de51ea063f0a91d199f930cbf0ab9536736f72c49f7c792d5d30234c038",
        enabled=envs.sm90,
    ),
    EditedFile(
        "vllm.vllm_flash_attn.cute.cache_utils",
        "fc62f0889f79b770717e9030cb003749a14a7e01b3ada1443062ca11ac0edb9d",
    ),
    EditedFile(
        "vllm.vllm_flash_attn.cute.flash_fwd",
        "2f953f9be60af867bc5ac3efb0823e440abe153f3309753325bbce9bf49a7ef2",
        enabled=envs.sm90,
    ),
    EditedFile(
        "vllm.vllm_flash_attn.cute.flash_fwd_sm100",
        "a080f5c1565a53bd90789ca88133ab055f0fa34e93fe866ed768f39c916667cb",
    ),
    EditedFile(
        "vllm.vllm_flash_attn.cute.flash_fwd_sm90",
        "3b5d0f896cce32d6940e8fb280b06719279d7d9af93e42346e2d51553fe4e7a1",
        enabled=envs.sm90,
    ),
    EditedFile(
        "vllm.vllm_flash_attn.cute.utils",
        "2115599e1eefed2f8504f7d1d48088bb7bf3286cf2ea2fa98eb093876267099f",
        enabled=envs.sm90,
    ),
)


# Files that the overlay leaves alone and stands on, and their SHA-256. The layer calls
# them, inherits from them, is called by them or shares an index with them. FA4's decide
# with which rows and columns and in which order of key blocks a callback is called, and
# under which key a compiled kernel is kept.
RELIED_ON = {
    "_custom_ops.py": (
        "f7add10b87105ad21539625d7409c771b0228ea015f06a891468f3ba40bf6fa1"
    ),
    "model_executor/warmup/jit_warmup.py": (
        "32de784ebe335149129563dbccc54cbdadf4641925659e0f01a07ff218169d19"
    ),
    "model_executor/warmup/jit_warmup_cutedsl_helper.py": (
        "8d3b448ac416747e8544d3c8d5487e79cb5561e67146c91eb07b4ab9f4796e9b"
    ),
    "model_executor/warmup/jit_warmup_triton_helper.py": (
        "59fe3d21f6d8ad625e953bbcf10b43e83f2379a82e755f9976ee797d28640d7c"
    ),
    "v1/attention/backends/fa_utils.py": (
        "d2ab2c0bf1daea3a6b73481c9e4438833fcd1ee714fa66869d279ca552948cdf"
    ),
    "v1/attention/backends/mla/flashattn_mla_sparse.py": (
        "a601bca31cac67a304883aa15b70bf1e7454cd8c6f57bd61137a6ac507fec6bc"
    ),
    "v1/attention/backends/mla/flashinfer_mla_sparse.py": (
        "8750f5fb8c64b92ed1f59c522b2cba6aa4cf255480cd70b49ca07152a15cc485"
    ),
    "v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py": (
        "480f2060f82313f32e149af00e8e988d01e37b95e96e45a696c07b25b7a32327"
    ),
    "v1/attention/backends/mla/flashmla_sparse.py": (
        "2fdaa4f410e3723dc77f2d812320dbb9ebbeb6b31eef9485a0af25d6047d2713"
    ),
    "v1/attention/backends/mla/index_group.py": (
        "16832938427dbf56e15050eaca0387914f06263b9a02ceaa56da0cfb3e9ceabd"
    ),
    "v1/attention/ops/merge_attn_states.py": (
        "5815194b80330fecd191b857a3210c096377d50b9c37dc7a9b332d9c7cf57450"
    ),
    "v1/kv_cache_interface.py": (
        "1e0b5027cc13ed845488ff3f671292e6c57fcae99c5b7130ad92c9d176a38684"
    ),
    "vllm_flash_attn/__init__.py": (
        "68d256feb9db6c1c397dc1458f6b42e2bbdc66429ae14d6a2d41c27ef0dbd878"
    ),
    "vllm_flash_attn/flash_attn_interface.py": (
        "234b33a0816e5ddc91ae5a9ac7238dd33803bd086c92f97ab904720ce261bfc3"
    ),
    "vllm_flash_attn/cute/block_info.py": (
        "f0ed9cc670dd7382e9ca65dcbe118b9abed4296ebadcc5d68a43ed33900c4968"
    ),
    "vllm_flash_attn/cute/interface.py": (
        "0d00d4b96c9cd616eae488ae394d6c50ab22e403a01df5a896995599fd62b2e3"
    ),
    "vllm_flash_attn/cute/seqlen_info.py": (
        "640d2433702635d68d4f0b94e9fa2d6b81da48b7f62056270b1b1fd480c72f30"
    ),
    "vllm_flash_attn/cute/sm100_hd256_2cta_fmha_forward.py": (
        "83f83a0c2dfe89804f2843ac5b1d56d42e353cd802eea61382f9a59c8e3ea937"
    ),
    "vllm_flash_attn/cute/tile_scheduler.py": (
        "27482cb3ef36aabcc07b115075557f6c18740790b4bd30986f2d52959be23abd"
    ),
}


def enabled_files() -> tuple[OverlaidFile, ...]:
    """The files of both tables that take part in this process."""
    return tuple(file for file in OVERLAID_FILES + EDITED_FILES if file.enabled())


def check_installed(
    version: str,
    package_dir: Path,
    overlaid: Sequence[OverlaidFile] = OVERLAID_FILES + EDITED_FILES,
    relied_on: Mapping[str, str] = RELIED_ON,
) -> None:
    """Compares an installed vLLM with the pinned one.

    Args:
        version: the installed vLLM's version; a local part ("+cu129") names a build of
            the same source and is not compared.
        package_dir: folder of the installed package.
        overlaid: what may be overlaid or edited; compared whether it is to be or not,
            since upstream's file is in use where it is not.
        relied_on: path below ``package_dir`` -> SHA-256 of what is not overlaid.

    Raises:
        RuntimeError: if something differs, with what, why and what to do.
    """
    made_for = f"this is made for vLLM {VLLM_VERSION}, but"
    install = (
        f"Install vllm=={VLLM_VERSION} (pip install --force-reinstall --no-deps "
        f"vllm=={VLLM_VERSION})"
    )
    other = f"{install}, or a vllm-sparse-mla made for vLLM {version}"
    if version.partition("+")[0] != VLLM_VERSION:
        raise RuntimeError(f"{made_for} vLLM {version} is installed. {other}")
    expected = {file.path_in_package: file.sha256 for file in overlaid} | relied_on
    for path_in_package, sha256 in expected.items():
        path = package_dir / path_in_package
        if sha256 is None and path.exists():
            raise RuntimeError(f"{made_for} vLLM {version} has a {path} too. {other}")
        if sha256 is None:
            continue
        if not path.is_file():
            raise RuntimeError(f"{made_for} vLLM {version} lacks {path}. {other}")
        found = hashlib.sha256(path.read_bytes())
        if found.hexdigest() == sha256:
            continue
        differs = f"{path} has SHA-256 {found.hexdigest()} in place of {sha256}"
        installed = _sha256_as_installed(package_dir, path_in_package)
        if installed is None or installed == found.digest():
            raise RuntimeError(
                f"{made_for} the installed vLLM {version} is another build of it: "
                f"{differs}. {other}"
            )
        raise RuntimeError(
            f"{made_for} a file of vLLM {version} was edited after it was installed, "
            f"perhaps by another tool: {differs}. {install}"
        )


def _sha256_as_installed(package_dir: Path, path_in_package: str) -> bytes | None:
    """Digest of a package's file in its installer's records; None without any."""
    name, site = package_dir.name, str(package_dir.parent)
    for distribution in Distribution.discover(name=name, path=[site]):
        for file in distribution.files or ():
            if str(file) == f"{name}/{path_in_package}" and file.hash is not None:
                return base64.urlsafe_b64decode(file.hash.value + "=")
    return None

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the check runs on: preparing the process, versions, device, overlay."""

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYER_MODULE = "vllm.model_executor.layers.attention.sparse_mla_attention"
_PACKAGES = ("vllm-sparse-mla", "vllm", "torch", "triton", "nvidia-cutlass-dsl")
_PROBE = (
    "from vllm.plugins import load_general_plugins; load_general_plugins(); "
    "from vllm_sparse_mla.check.environment import print_overlay; print_overlay()"
)
_PROBE_TIMEOUT_S = 300


def prepare_process(capability: tuple[int, int] | None = None) -> bool:
    """Make this process ready to run the overlaid layer, or to ask vLLM about a GPU.

    Without a GPU, hides CUDA, lets Triton interpret its kernels and keeps vLLM from
    pinning memory. Then loads vLLM's general plugins, as each vLLM process does. Call
    it before anything imports vLLM. Given a compute capability, vLLM is to see GPUs
    of it, here or not. Tells whether there is a GPU to run on.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if capability else "WARNING")
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
    if capability:
        from vllm_sparse_mla.check.gpu import stand_in_for_gpu

        stand_in_for_gpu(capability)
    if not has_gpu:
        import vllm.utils.torch_utils

        vllm.utils.torch_utils.PIN_MEMORY = False
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if not has_gpu:
        from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

        install_parent_module()
    return has_gpu


@dataclass(frozen=True)
class OverlayState:
    """Whether a process runs the overlaid layer."""

    active: bool  # the layer module comes from the overlay tree
    layer_file: str  # the file that it comes from
    files: tuple[str, ...]  # paths in vLLM's package that are overlaid
    error: str = ""  # why the state is unknown, if it is


def overlay_state() -> OverlayState:
    """Import the layer module in this process and see where it came from."""
    from vllm_sparse_mla import overlay

    layer_file = importlib.import_module(LAYER_MODULE).__file__ or ""
    finder = overlay.active_finder()
    root = overlay.overlay_root()
    return OverlayState(
        active=finder is not None and Path(layer_file).resolve().is_relative_to(root),
        layer_file=layer_file,
        files=tuple(file.path_in_package for file in finder.files) if finder else (),
    )


def print_overlay() -> None:
    """Print this process's state as a line of JSON, for `new_process_overlay_state`."""
    print(json.dumps(vars(overlay_state())))


def new_process_overlay_state() -> OverlayState:
    """The state of a new Python process that loads vLLM's general plugins."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROBE],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_PROBE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            error = f"the process did not end within {_PROBE_TIMEOUT_S} s"
            return OverlayState(False, "", (), error)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        tail = " | ".join(done.stderr.splitlines()[-3:])
        error = f"the process ended with code {done.returncode}: {tail}"
        return OverlayState(False, "", (), error)
    state = json.loads(lines[-1])
    return OverlayState(**state | {"files": tuple(state["files"])})


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide what runs; "not installed" if absent."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def device_description() -> str:
    """The device's name and, of a GPU, its architecture."""
    import torch

    if not torch.cuda.is_available():
        return f"CPU ({platform.machine()}), Triton kernels in the interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (SM{major}{minor})"


def uses_fa4() -> bool:
    """Whether this device runs FA4 with packed masks, rather than the reference.

    SM100 does. SM90 does where the operator asked for it.
    """
    import torch

    from vllm_sparse_mla import envs

    if not torch.cuda.is_available():
        return False
    major, _ = torch.cuda.get_device_capability()
    return major == 10 or (major == 9 and envs.sm90())


@dataclass(frozen=True)
class EnvironmentReport:
    """Versions, device, overlay in this process and in a new one."""

    versions: dict[str, str]
    device: str
    overlay: OverlayState
    overlay_in_new_process: OverlayState

    @property
    def ok(self) -> bool:
        return self.overlay.active and self.overlay_in_new_process.active

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok} | asdict(self)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lets vLLM decide for a GPU that is not here."""

import importlib
import sys
from types import ModuleType

# Extensions that vLLM's CUDA platform and attention backends import. They load only
# where libcuda is; nothing of them is called to decide.
_EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# No launch asks for more; vLLM refuses one that asks for more than there are.
_DEVICE_COUNT = 2**16


def stand_in_for_gpu(capability: tuple[int, int]) -> None:
    """Make vLLM see GPUs of this compute capability in this process.

    Only what vLLM asks its platform is answered: enough to resolve a configuration and
    an attention backend, nothing runs. Comes before anything that asks for vLLM's
    platform, so the process can serve nothing else.

    Raises:
        RuntimeError: if vLLM has looked for a platform already.
    """
    from vllm import platforms
    from vllm.platforms.interface import DeviceCapability

    if platforms._current_platform is not None:
        raise RuntimeError("vLLM has a platform already")
    try:
        importlib.import_module(_EXTENSIONS[0])
        complete = True
    except ImportError:
        complete = False
        for name in _EXTENSIONS:
            sys.modules[name] = ModuleType(name, "Stand-in without libcuda.")
    from vllm.platforms.cuda import CudaPlatformBase

    class AbsentGpu(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA SM{}{}".format(*capability)

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 2**37

        @classmethod
        def device_count(cls) -> int:
            return _DEVICE_COUNT

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    platforms._current_platform = AbsentGpu()
    if not complete:
        _answer_for_extensions()


def _answer_for_extensions() -> None:
    """Let vLLM's modules ask, on import, which of the extensions' kernels can run."""
    from vllm import _custom_ops

    for name in dir(_custom_ops):
        if "_supports_" in name or name.endswith("_supported"):
            setattr(_custom_ops, name, lambda *_: True)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run ``vllm serve`` as a child process and read its log.

Three variants of one installation: ``stock`` loads no plugin, ``patched`` loads
the patch set, ``opt-in`` also asks for masked MHA on Hopper.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

VARIANTS = ("stock", "patched", "opt-in")
MODEL_NAME = "model"

# Keeps start-up short: no torch.compile and no CUDA graphs, as with vLLM's
# `--enforce-eager`, but with JIT warm-up and the JIT monitor left on.
NO_COMPILE = ("-cc", '{"mode": 0, "cudagraph_mode": "NONE"}')

# NVLink multicast is a property of the host that a test must not depend on.
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}

_ACTIVE_LINE = re.compile(r"vllm-sparse-mla \S+ is active on vLLM")
_JIT_LINE = re.compile(r"(?:compilation|autotuning)\b.* during inference: (\S+?)[. (]")
_PID = re.compile(r"\bpid=(\d+)\)")


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def variant_environment(variant: str) -> dict[str, str]:
    """Environment that makes one installation serve as ``variant``.

    Raises:
        ValueError: ``variant`` is not one of ``VARIANTS``.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}.")
    if variant == "stock":
        return {"VLLM_PLUGINS": ""}
    return {
        "VLLM_SPARSE_MLA_STRICT": "1",
        "VLLM_SPARSE_MLA_SM90": str(int(variant == "opt-in")),
    }


@dataclass
class Server:
    """One ``vllm serve`` process."""

    model: Path  # folder of the model
    variant: str  # one of ``VARIANTS``
    folder: Path  # gets its log and what its probe records
    max_model_len: int = 8192  # longest sequence in tokens
    max_num_batched_tokens: int = 8192  # token budget of a scheduler step
    max_num_seqs: int = 64  # most requests in a step
    # KV cache size. Given, so that vLLM does not derive it from free memory, which
    # servers that start side by side change.
    kv_cache_gib: float = 4.0
    kv_cache_dtype: str = "auto"  # as ``vllm serve`` takes it
    # Whether to read the model's; prompts are token ids otherwise.
    tokenizer: bool = False
    several_gpus: bool = False  # whether ``extra_args`` ask for more GPUs than one
    # Further command line arguments.
    extra_args: Sequence[str] = NO_COMPILE
    # Further environment variables.
    extra_env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen | None = field(default=None, init=False)

    @property
    def log_path(self) -> Path:
        """The file that gets stdout and stderr of all its processes."""
        return self.folder / "server.log"

    @property
    def url(self) -> str:
        """Base address of the HTTP server."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The command line."""
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
            str(self.model),
            *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1"),
            *("--port", str(self.port)),
            *(() if self.tokenizer else ("--skip-tokenizer-init",)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--gpu-memory-utilization", "0.1"),
            *("--kv-cache-memory-bytes", str(int(self.kv_cache_gib * 2**30))),
            *("--kv-cache-dtype", self.kv_cache_dtype),
            *("--jit-monitor-verbose", "--enable-prompt-tokens-details"),
            *("--disable-uvicorn-access-log", "--seed", "0"),
            *self.extra_args,
        ]

    def start(self) -> "Server":
        """Start the process and return at once; see ``wait_ready``."""
        environment = os.environ | variant_environment(self.variant)
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if NO_COMPILE[0] in self.extra_args:
            environment["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"
        # Set by CPU test runs; a server wants the GPU and compiled kernels.
        environment.pop("TRITON_INTERPRET", None)
        if self.several_gpus:
            environment |= _NO_MULTICAST
        environment |= self.extra_env
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            # Not in a checkout: the server must find the installed packages.
            self.process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout: float = 400.0) -> None:
        """Wait until ``/health`` answers.

        Raises:
            RuntimeError: The process ended, or was not ready in ``timeout``
                seconds; the message ends with the last lines of the log.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                break
            if self.is_healthy():
                return
            time.sleep(0.5)
        tail = "\n".join(self.log_text().splitlines()[-40:])
        self.stop()
        raise RuntimeError(
            f"The {self.variant} server was not ready within {timeout:.0f} s. "
            f"Its log ends:\n{tail}"
        )

    def is_healthy(self) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, timeout: float = 30.0) -> None:
        """End the process and its children."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        # The session's other processes, should the parent have left any.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def engine_processes(self) -> list[psutil.Process]:
        """The engine core and worker processes, workers first."""
        if self.process is None:
            return []
        children = psutil.Process(self.process.pid).children(recursive=True)
        titles = [(child, " ".join(child.cmdline())) for child in children]
        workers = [child for child, title in titles if "VLLM::Worker" in title]
        engines = [child for child, title in titles if "VLLM::EngineCore" in title]
        return workers + engines

    def log_text(self) -> str:
        """Everything logged so far."""
        return self.log_path.read_text(errors="replace")

    def active_pids(self) -> list[int]:
        """The process of each line that says the patch set is active, in order.

        0 stands for a line that does not tell.
        """
        lines = filter(_ACTIVE_LINE.search, self.log_text().splitlines())
        found = (_PID.search(line) for line in lines)
        return [int(match[1]) if match else 0 for match in found]

    def jit_kernels(self) -> list[str]:
        """Kernels that vLLM's JIT monitor saw compiled after warm-up, in order."""
        return _JIT_LINE.findall(self.log_text())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Servers and answers that the tests with a real `vllm serve` share.

``SPARSE_MLA_TEST_REPORT_DIR`` names a folder that gets the servers' logs and the
differences of their answers.
"""

import contextlib
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import scenario
from serving.probe import probe_environment
from serving.server import VARIANTS, Server

from vllm_sparse_mla.testing.tiny_model import write_model

_NO_PARAMS = SimpleNamespace(params={})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` one worker has all tests of the same servers."""
    for item in items:
        if "servers" in (params := getattr(item, "callspec", _NO_PARAMS).params):
            item.add_marker(pytest.mark.xdist_group(f"servers-{params['servers']}"))


@pytest.fixture(scope="session")
def sm90_gpus() -> int:
    """Hopper GPUs of this machine; skips without one."""
    with contextlib.suppress(FileNotFoundError):
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        count = answer.stdout.split().count("9.0")
        if count:
            return count
    pytest.skip("needs an SM90 GPU (H100, H200) to run `vllm serve` on")


@pytest.fixture(scope="session")
def serve_folder(tmp_path_factory) -> Path:
    """Holds the models and, per server, a folder with log and probe records."""
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="session")
def model_folder(serve_folder) -> Callable[[str], Path]:
    """Gives the folder of a model by name, written at its first use."""

    @functools.cache
    def written(name: str) -> Path:
        return write_model(serve_folder / f"model-{name}", name)

    return written


@pytest.fixture(scope="session")
def report_dir() -> Path | None:
    """The folder for reports, made where it is missing; None without the variable."""
    name = os.environ.get("SPARSE_MLA_TEST_REPORT_DIR")
    if not name:
        return None
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def start_server(
    serve_folder, model_folder, report_dir
) -> Iterator[Callable[..., Server]]:
    """Starts a server by name, with the probe; all end with the session."""
    started: dict[str, Server] = {}

    def start(name: str, variant: str, **kwargs) -> Server:
        # What is compared is masked MHA with sparse MQA, at every length.
        environment = probe_environment(serve_folder / name, all_lengths=True)
        environment |= kwargs.pop("extra_env", {})
        fields = {
            "max_model_len": scenario.MAX_MODEL_LEN,
            "max_num_batched_tokens": scenario.TOKEN_BUDGET,
            "max_num_seqs": 16,
        }
        started[name] = Server(
            model_folder(kwargs.pop("model", scenario.MODEL)),
            variant,
            serve_folder / name / "server.log",
            extra_env=environment,
            **fields | kwargs,
        )
        return started[name].start()

    yield start
    for server in started.values():
        server.stop()
    if report_dir is not None:
        for name, server in started.items():
            (report_dir / f"{name}.log").write_text(server.log_text())


@pytest.fixture(scope="session")
def servers(request, sm90_gpus, start_server) -> Iterator[dict[str, Server]]:
    """Stock, patched and opt-in on one GPU, started side by side.

    The parameter is the dtype of their KV caches.
    """
    started = {
        variant: start_server(
            f"{variant}-{request.param}", variant, kv_cache_dtype=request.param
        )
        for variant in VARIANTS
    }
    for server in started.values():
        server.wait_ready()
    yield started
    for server in started.values():
        server.stop()

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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from serving import scenario
from serving.probe import probe_environment
from serving.server import VARIANTS, Server
from serving.servers import side_by_side

from vllm_sparse_mla.testing.tiny_model import write_model


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` one worker has all tests of the same servers."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "servers" in callspec.params:
            group = f"servers-{callspec.params['servers']}"
            item.add_marker(pytest.mark.xdist_group(group))


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
def run_python() -> Callable[..., list[str]]:
    """Runs code in a new Python, with arguments and variables: the lines it prints."""

    def run(code: str, *args: str, folder: Path, **env: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=folder,
            env=os.environ | env,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run


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
def running(
    serve_folder, model_folder, report_dir
) -> Callable[..., AbstractContextManager[dict[str, Server]]]:
    """Servers by variant, started side by side, each with the probe.

    The function takes a prefix for the names of their folders, the variants, and fields
    of ``Server``.
    """

    @contextlib.contextmanager
    def run(prefix: str, variants: Sequence[str] = VARIANTS, **fields):
        fields = {
            "max_model_len": scenario.MAX_MODEL_LEN,
            "max_num_batched_tokens": scenario.TOKEN_BUDGET,
            "max_num_seqs": 16,
        } | fields
        model = model_folder(fields.pop("model", scenario.MODEL))
        environment = fields.pop("extra_env", {})
        servers = {}
        for variant in variants:
            folder = serve_folder / f"{prefix}-{variant}"
            # What is compared is masked MHA with sparse MQA, at every length.
            probe = probe_environment(folder, all_lengths=True)
            servers[variant] = Server(
                *(model, variant, folder),
                extra_env=probe | environment,
                **fields,
            )
        try:
            with side_by_side(servers):
                yield servers
        finally:
            for variant, server in servers.items():
                if report_dir is not None and server.log_path.exists():
                    log = report_dir / f"{prefix}-{variant}.log"
                    log.write_text(server.log_text())

    return run


@pytest.fixture(scope="session")
def servers(request, sm90_gpus, running) -> Iterator[dict[str, Server]]:
    """Stock, patched and opt-in on one GPU.

    The parameter is the dtype of their KV caches.
    """
    with running(f"serve-{request.param}", kv_cache_dtype=request.param) as started:
        yield started

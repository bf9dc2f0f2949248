# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Set-up that has to happen before vLLM is imported, and options of the suite."""

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest


def _has_gpu() -> bool:
    # Without importing torch: what is decided here has to be set before.
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return "GPU" in listed.stdout


HAS_GPU = _has_gpu()
if not HAS_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stock",
        action="store_true",
        help="run against vLLM without the overlay; tests marked stock_fails must fail",
    )
    parser.addoption(
        "--gpu",
        action="store_true",
        help="run what a GPU decides: tests marked gpu, and tests that put tensors on "
        "whatever device there is; without an NVIDIA GPU an error",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu") and not HAS_GPU:
        raise pytest.UsageError("--gpu needs an NVIDIA GPU, and there is none here")
    by_default = f"-m{config.option.markexpr}" in config.getini("addopts")
    if config.getoption("--gpu") and by_default:
        config.option.markexpr = "not (extra or codegen)"
    if config.getoption("--stock"):
        # A test that makes vLLM load its plugins gets none either.
        os.environ["VLLM_PLUGINS"] = ""
    else:
        from vllm_sparse_mla.plugin import register

        os.environ["VLLM_SPARSE_MLA_STRICT"] = "1"
        register()
    if not HAS_GPU:
        import vllm.utils.torch_utils
        from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

        vllm.utils.torch_utils.PIN_MEMORY = False
        install_parent_module()


def pytest_report_header(config: pytest.Config) -> str:
    overlay = "stock" if config.getoption("--stock") else "overlay"
    device = "GPU" if HAS_GPU else "CPU with Triton's interpreter"
    return f"sparse MLA: {overlay}, {device}"


def _a_gpu_decides(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("gpu")) or "device" in item.fixturenames


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    stock = config.getoption("--stock")
    if config.getoption("--gpu"):
        left_out = [item for item in items if not _a_gpu_decides(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _a_gpu_decides(item)]
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        known = item.get_closest_marker("stock_fails")
        if stock and known:
            # `run=False` where stock would take the test process down.
            expected = pytest.mark.xfail(
                reason=known.args[0], strict=True, run=known.kwargs.get("run", True)
            )
            item.add_marker(expected)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.getoption("--stock"):
        return
    failures = terminalreporter.getreports("xfailed")
    # Pytest puts "[NOTRUN] " before the reason of a test that it did not run.
    reasons = Counter(
        report.wasxfail.removeprefix("reason: ").removeprefix("[NOTRUN] ")
        for report in failures
    )
    terminalreporter.section("stock vLLM fails, the patch set passes")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count:4} tests: {reason}")

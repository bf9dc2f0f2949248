# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A run that was to use a GPU does not pass by skipping everything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_without_a_gpu_it_is_an_error():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--gpu", "--collect-only"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--gpu needs an NVIDIA GPU, and there is none here" in done.stderr

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tests of this folder share."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device to put tensors on: the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Hopper opt-in of masked MHA: its switch and its prefill thresholds."""

import os

from vllm.platforms import current_platform


def sm90_masked_mha_enabled() -> bool:
    """Whether the operator asked for masked MHA on SM90, and this is SM90."""
    return os.getenv(
        "VLLM_SPARSE_MLA_SM90", "0"
    ) == "1" and current_platform.is_device_capability_family(90)


def install_sm90_thresholds() -> None:
    """Put the thresholds measured on SM90 into vLLM's table."""

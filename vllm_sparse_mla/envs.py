# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The project's environment variables, in the form in which vLLM keeps its own."""

import os
from collections.abc import Callable
from typing import Any


def _switch(name: str) -> bool:
    """Reads a variable that is 1 for on, and 0, empty or unset for off.

    Raises:
        ValueError: if the value is neither on nor off.
    """
    value = os.environ.get(name, "")
    if value not in ("1", "0", ""):
        raise ValueError(f"{name} must be 1, 0 or empty, got {value!r}")
    return value == "1"


def strict() -> bool:
    """Whether a vLLM that the patch set is not made for is an error."""
    return _switch("VLLM_SPARSE_MLA_STRICT")


def sm90() -> bool:
    """Whether the operator asked for masked MHA on Hopper."""
    return _switch("VLLM_SPARSE_MLA_SM90")


ENVIRONMENT_VARIABLES: dict[str, Callable[[], Any]] = {
    "VLLM_SPARSE_MLA_STRICT": strict,
    "VLLM_SPARSE_MLA_SM90": sm90,
}


def register_with_vllm() -> None:
    """Makes the names known to vLLM, which warns of VLLM_* names that it lacks."""
    import vllm.envs

    vllm.envs.environment_variables.update(ENVIRONMENT_VARIABLES)

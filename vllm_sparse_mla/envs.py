# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The project's environment variables, in the form in which vLLM keeps its own."""

import os

STRICT = "VLLM_SPARSE_MLA_STRICT"
SM90 = "VLLM_SPARSE_MLA_SM90"
QUANTIZED_KV = "VLLM_SPARSE_MLA_QUANTIZED_KV"
COSTS = "VLLM_SPARSE_MLA_COSTS"


def _switch(name: str) -> bool:
    """Reads a variable as vLLM reads its own: 1 and true are on."""
    return os.environ.get(name, "0").strip().lower() in ("true", "1")


def strict() -> bool:
    """Whether it is an error that the overlay cannot be put in force."""
    return _switch(STRICT)


def sm90() -> bool:
    """Whether the operator asked for masked MHA on Hopper."""
    return _switch(SM90)


def quantized_kv() -> bool:
    """Whether the operator asked for masked MHA over quantized KV caches on SM100."""
    return _switch(QUANTIZED_KV)


def costs() -> str | None:
    """The file of coefficients by which the operator wants prefills to be estimated."""
    return os.environ.get(COSTS)


def check() -> None:
    """Refuses values that mean nothing.

    Raises:
        ValueError: if a switch is neither on nor off.
    """
    for name in (STRICT, SM90, QUANTIZED_KV):
        value = os.environ.get(name, "")
        if value.strip().lower() not in ("true", "1", "false", "0", ""):
            raise ValueError(
                f"{name} must be 1, true, 0, false or empty, got {value!r}"
            )


def register_with_vllm() -> None:
    """Makes the names known to vLLM, which warns of VLLM_* names that it lacks."""
    import vllm.envs

    # vLLM keys its torch.compile cache by the values of all that it knows. Strictness
    # changes nothing that is compiled, so vLLM gets its name alone.
    vllm.envs.environment_variables.update(
        {
            STRICT: lambda: None,
            SM90: sm90,
            QUANTIZED_KV: quantized_kv,
            COSTS: costs,
        }
    )

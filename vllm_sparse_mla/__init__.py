# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse-MLA masked-MHA prefill: a patch set that is served over an installed vLLM."""

__version__ = "0.1.0"

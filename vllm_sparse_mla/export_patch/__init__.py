# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes the overlay as a patch against upstream's own files."""

from vllm_sparse_mla.export_patch.cli import command

__all__ = ["command"]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whose mask a workspace holds, so that layers that share an index build it once.

A metadata builder has one workspace for all its steps, and several index groups write
to it: whoever writes says so here. A note on the step's metadata would not know of
another batch that has written since.
"""

import weakref
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class _Source(NamedTuple):
    """What a workspace was last written from; see ``note_topk_mask``."""

    prefill: "weakref.ref[object]"
    index_group: object
    topk_address: int
    shape: tuple[int, int, int]


_SOURCES: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()


def note_topk_mask(
    workspace: torch.Tensor,
    prefill: object,
    index_group: object,
    topk: torch.Tensor,
    shape: tuple[int, int, int],
) -> None:
    """Note that the workspace now begins with a whole-sequence mask.

    Args:
        workspace: the tensor itself, not a view of it.
        prefill: the step's metadata, which stands for the step and its metadata
            builder: each builder makes it anew for each step.
        index_group: whose indexer result the mask is of.
        topk: the rows from which it was built.
        shape: of the mask.
    """
    source = _Source(weakref.ref(prefill), index_group, topk.data_ptr(), shape)
    _SOURCES[workspace] = source


def forget_topk_mask(workspace: torch.Tensor) -> None:
    """Say that the workspace is about to be written with something else."""
    _SOURCES.pop(workspace, None)


def holds_topk_mask(
    workspace: torch.Tensor,
    prefill: object,
    index_group: object,
    topk: torch.Tensor,
    shape: tuple[int, int, int],
) -> bool:
    """Whether it holds what ``note_topk_mask`` would note."""
    source = _SOURCES.get(workspace)
    return (
        source is not None
        and source.prefill() is prefill
        and source.index_group is index_group
        and source.topk_address == topk.data_ptr()
        and source.shape == shape
    )

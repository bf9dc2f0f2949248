# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which kernels the instrument can compile: the variant and its parts."""

import re
from dataclasses import dataclass, replace
from itertools import product

HEAD_DIMS = ((192, 128), (256, 256))

#: Names of the callbacks. Besides these a callback may be ``FILE.py:FUNCTION``.
CALLBACKS = {
    "none": "the unmasked kernel",
    "word32": "one 32-bit mask word a call",
    "word32_scalar": "one bit of one 32-bit mask word a call, no __vec_size__",
    "stock_dense": "dense_mask_mod of the installed vLLM",
    "stock_offset": "offset_dense_mask_mod of the installed vLLM",
    "dense": "this project's dense_mask_mod",
    "offset": "this project's offset_dense_mask_mod",
}

_ARCH = re.compile(r"sm_(90|100|103|110|120)[af]?")


@dataclass(frozen=True)
class Variant:
    """One specialisation of FA4's forward kernel (BF16, varlen, one split)."""

    head_dim: int = 192  # head dimension of Q and K
    head_dim_v: int = 128  # head dimension of V
    causal: bool = False  # FA4's own causal masking, besides the callback
    lse: bool = True  # whether the kernel also writes the log-sum-exp
    batch: int = 1  # number of requests
    # A key of ``CALLBACKS``, or ``FILE.py:FUNCTION`` with an absolute path.
    callback: str = "none"
    key_starts: bool = False  # give the callback a second aux tensor, int32 [batch]
    sliced: bool = False  # give the mask as a slice, by request, of a larger one
    # FA4's SM100 kernel as the installed vLLM has it, without the patch set's edit.
    stock_kernel: bool = False
    # Target such as ``sm_100a``; None means the target that is given to
    # ``compile_variants``.
    arch: str | None = None
    # Not FA4 but a kernel that only calls the callback, once per row and group of 128
    # columns (``callback_kernel``); head dimensions, ``causal``, ``lse`` and ``batch``
    # mean nothing then.
    alone: bool = False

    def __post_init__(self) -> None:
        dims = (self.head_dim, self.head_dim_v)
        if dims not in HEAD_DIMS:
            raise ValueError(
                f"head_dim, head_dim_v must be one of {HEAD_DIMS}, got {dims}"
            )
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        if self.callback not in CALLBACKS and ":" not in self.callback:
            raise ValueError(
                f"callback must be one of {', '.join(CALLBACKS)} or "
                f"FILE.py:FUNCTION, got {self.callback!r}"
            )
        if self.arch is not None:
            check_arch(self.arch)

    @property
    def label(self) -> str:
        """Short name, unique among variants of one target."""
        if self.alone:
            return f"alone {self.callback_label}"
        words = [
            f"{self.head_dim}/{self.head_dim_v}",
            "causal" if self.causal else "full",
            "lse" if self.lse else "no-lse",
            f"b{self.batch}",
            self.callback_label,
        ]
        return " ".join(words) + " stock-kernel" * self.stock_kernel

    @property
    def callback_label(self) -> str:
        """The callback as tables show it."""
        name = self.callback.rsplit("/", 1)[-1]
        return name + "+key_starts" * self.key_starts + "+sliced" * self.sliced

    @property
    def unmasked(self) -> "Variant":
        """The same kernel without a callback."""
        return replace(self, callback="none", key_starts=False, sliced=False)


def check_arch(arch: str) -> str:
    """Return ``arch`` if it names a target that FA4 and the DSL know.

    Raises:
        ValueError: otherwise.
    """
    if not _ARCH.fullmatch(arch):
        raise ValueError(
            "arch must look like sm_100a (sm_90, 100, 103, 110 or 120, with an "
            f"optional a or f), got {arch!r}"
        )
    return arch


def every_variant(callbacks: tuple[str, ...] | None = None) -> list[Variant]:
    """All head dimensions, causal or not, with and without LSE, one and two requests.

    Args:
        callbacks: names to cross them with; by default each that SM100 can run
            with packed words, and ``offset`` once more with key starts.
    """
    if callbacks is None:
        callbacks = tuple(name for name in CALLBACKS if name != "word32_scalar")
    grid = product(HEAD_DIMS, (False, True), (True, False), (1, 2))
    variants = []
    for (head_dim, head_dim_v), causal, lse, batch in grid:
        for callback in callbacks:
            kinds = (False, True) if callback == "offset" else (False,)
            variants += [
                Variant(head_dim, head_dim_v, causal, lse, batch, callback, kind)
                for kind in kinds
            ]
    return variants


#: What FA4 runs on SM90, where stock takes scalar callbacks and the overlay adds ours.
SM90_CALLBACKS = ("none", "word32_scalar", "dense", "offset")


def runs_on_sm90(variant: Variant) -> bool:
    """Whether FA4 applies the callback: beside ``causal`` it ignores a scalar one."""
    return not (variant.causal and variant.callback == "word32_scalar")


def short_list(callbacks: tuple[str, ...] | None = None) -> list[Variant]:
    """The variants with LSE and one request: what the command shows by default."""
    return [v for v in every_variant(callbacks) if v.lse and v.batch == 1]

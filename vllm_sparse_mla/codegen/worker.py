# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a process that compiles does: variants in, records out.

The DSL latches its target when it is first imported, so such a process has one target
and sets it before that; ``compiler`` starts them.
"""

import functools
import importlib
import inspect
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from vllm_sparse_mla.codegen.callbacks import load_callback, put_overlay_in_force
from vllm_sparse_mla.codegen.disassembly import read_cubin, read_ptx_loads
from vllm_sparse_mla.codegen.records import CodegenRecord
from vllm_sparse_mla.codegen.variants import Variant
from vllm_sparse_mla.testing.stock import load_stock_module

# The middle shape of upstream's table. Only what FA4 specialises on reaches the
# kernel: more than one query tile, no split.
NUM_QUERIES = 1024
NUM_KEYS = 8192
NUM_HEADS = 8


def environment(arch: str, dump_dir: Path) -> dict[str, str]:
    """Variables that make a fresh process compile for ``arch`` with no GPU."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "FLASH_ATTENTION_ARCH": arch.rstrip("af"),
        # Only selects among kernels when FA4 splits, which it is told not to do.
        "FLASH_ATTENTION_NUM_SMS": "132" if arch.startswith("sm_90") else "148",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": str(dump_dir),
        "VLLM_SPARSE_MLA_STRICT": "1",
        "VLLM_SPARSE_MLA_SM90": "1" if arch.startswith("sm_90") else "0",
    }


class CodegenError(RuntimeError):
    """A variant did not compile, or its worker died."""


class TraceCount:
    """Counts what happens while FA4 traces a kernel.

    The DSL runs the Python of a kernel once per place where its code goes, so a plain
    function around the mask functions sees each emission exactly once.
    """

    def __init__(self) -> None:
        self.applications = 0
        self.mask_calls = 0

    def around(self, mask_mod: Callable) -> Callable:
        """Return ``mask_mod`` as FA4 sees it, but counted."""

        # Attributes come along: FA4 reads __vec_size__ and the like from the callback.
        @functools.wraps(mask_mod)
        def counted(*args):
            self.mask_calls += 1
            return mask_mod(*args)

        return counted

    @contextmanager
    def watching(self):
        """Count FA4's applications of a mask to a tile of scores."""
        from vllm.vllm_flash_attn.cute.mask import AttentionMask

        def counted(original):
            def apply(mask, *args, **kwargs):
                self.applications += kwargs.get("mask_mod") is not None
                return original(mask, *args, **kwargs)

            return apply

        names = ("apply_mask", "apply_mask_sm100")
        replaced = {name: counted(getattr(AttentionMask, name)) for name in names}
        with patch.multiple(AttentionMask, **replaced):
            yield


@contextmanager
def stock_kernel(wanted: bool):
    """Let FA4 use its SM100 kernel as upstream has it, if ``wanted``."""
    if not wanted:
        yield
        return
    from vllm.vllm_flash_attn.cute import interface

    name = "FlashAttentionForwardSm100"
    stock = load_stock_module("vllm.vllm_flash_attn.cute.flash_fwd_sm100")
    with patch.object(interface, name, getattr(stock, name)):
        yield


def compile_variant(variant: Variant, dump_dir: Path) -> CodegenRecord:
    """Compile one variant in this process and read what came out.

    The DSL leaves cubin and PTX in ``dump_dir``, which is emptied first.
    """
    for leftover in dump_dir.iterdir():
        leftover.unlink()
    mask_mod = load_callback(variant)
    count = TraceCount()
    vec_size = getattr(mask_mod, "__vec_size__", 1)
    if mask_mod is not None:
        mask_mod = count.around(mask_mod)
    start = time.perf_counter()
    with count.watching(), stock_kernel(variant.stock_kernel):
        if variant.alone:
            _trace_alone(variant, mask_mod)
        else:
            _trace_attention(variant, mask_mod)
    seconds = time.perf_counter() - start
    cubin = _only_file(dump_dir, ".cubin")
    found = read_cubin(cubin)
    return CodegenRecord(
        **vars(found) | {"versions": _versions() | found.versions},
        variant=variant,
        cubin_bytes=cubin.stat().st_size,
        ptx_loads=read_ptx_loads(_only_file(dump_dir, ".ptx").read_text()),
        applications=int(mask_mod is not None) if variant.alone else count.applications,
        mask_calls=count.mask_calls,
        vec_size=vec_size,
        seconds=round(seconds, 2),
    )


def _only_file(folder: Path, suffix: str) -> Path:
    files = [path for path in folder.iterdir() if path.suffix == suffix]
    if len(files) != 1:
        raise RuntimeError(f"expected one {suffix} file from the DSL, got {len(files)}")
    return files[0]


def _versions() -> dict[str, str]:
    packages = {"vllm": "vllm", "torch": "torch", "cutlass_dsl": "nvidia-cutlass-dsl"}
    return {name: version(package) for name, package in packages.items()}


def _trace_alone(variant: Variant, mask_mod: Callable | None) -> None:
    from vllm_sparse_mla.codegen.callback_kernel import compile_callback_kernel

    compile_callback_kernel.cache_clear()
    compile_callback_kernel(mask_mod, variant.key_starts)


def _trace_attention(variant: Variant, mask_mod: Callable | None) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    # FA4 would answer from memory for two variants that its key does not tell apart.
    _flash_attn_fwd.compile_cache.clear()
    with FakeTensorMode():
        bf16 = torch.bfloat16
        q = tensor(NUM_QUERIES, NUM_HEADS, variant.head_dim, dtype=bf16)
        k = tensor(NUM_KEYS, NUM_HEADS, variant.head_dim, dtype=bf16)
        v = tensor(NUM_KEYS, NUM_HEADS, variant.head_dim_v, dtype=bf16)
        aux = {}
        if mask_mod is not None:
            # A slice is a new object, so marks on the tensor would be lost with it.
            skipped = 2 if variant.sliced else 0
            mask = tensor(variant.batch + 2 * skipped, NUM_QUERIES, NUM_KEYS // 32)
            aux_tensors = [mask[skipped : skipped + variant.batch]]
            leading_dims = [2]
            if variant.key_starts:
                aux_tensors.append(tensor(variant.batch))
                leading_dims.append(0)
            aux = _aux_arguments(_flash_attn_fwd, aux_tensors, leading_dims)
        _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=tensor(variant.batch + 1),
            cu_seqlens_k=tensor(variant.batch + 1),
            max_seqlen_q=NUM_QUERIES,
            max_seqlen_k=NUM_KEYS,
            softmax_scale=variant.head_dim**-0.5,
            causal=variant.causal,
            num_splits=1,
            return_lse=variant.lse,
            mask_mod=mask_mod,
            **aux,
        )


def _aux_arguments(forward: Callable, tensors: list, leading_dims: list[int]) -> dict:
    aux = {"aux_tensors": tensors}
    if "aux_tensor_leading_dims" in inspect.signature(forward).parameters:
        return aux | {"aux_tensor_leading_dims": leading_dims}
    # FA4 releases on PyPI without that argument read it from the tensors.
    for tensor, leading_dim in zip(tensors, leading_dims):
        tensor.__leading_dim__ = leading_dim
    return aux


def use_fa4_from(folder: str) -> None:
    """Let ``flash_attn.cute`` of a folder take the place of the one in vLLM."""
    import vllm.vllm_flash_attn as parent

    sys.path.insert(0, folder)
    ours = "flash_attn.cute"
    importlib.import_module(f"{ours}.interface")
    for name, module in list(sys.modules.items()):
        if name == ours or name.startswith(f"{ours}."):
            sys.modules[f"{parent.__name__}.cute{name.removeprefix(ours)}"] = module
    parent.cute = sys.modules[ours]


def start_worker(arch: str, folder: str, fa4_dir: Path | None) -> None:
    """Prepare this process to compile for ``arch``; before any import of vLLM.

    ``folder`` gets what the DSL dumps and what libraries print; ``fa4_dir`` is as of
    ``compile_variants``.
    """
    dump_dir = Path(folder, str(os.getpid()))
    dump_dir.mkdir()
    log = os.open(f"{dump_dir}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    os.environ.update(environment(arch, dump_dir))
    os.environ.pop("TRITON_INTERPRET", None)
    warnings.simplefilter("ignore")
    from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

    install_parent_module()
    # FA4's own modules are replaced and edited: before their first import.
    put_overlay_in_force()
    if fa4_dir is not None:
        use_fa4_from(str(fa4_dir))


def compile_in_worker(variant: Variant) -> CodegenRecord:
    """Compile one variant in a process that ``start_worker`` has prepared.

    Raises:
        CodegenError: if it does not compile. The cause, which may not survive the way
            to another process, is part of the message.
    """
    try:
        return compile_variant(variant, Path(os.environ["CUTE_DSL_DUMP_DIR"]))
    except Exception as error:
        raise CodegenError(
            f"{variant.label} did not compile for {variant.arch}: "
            f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        ) from None

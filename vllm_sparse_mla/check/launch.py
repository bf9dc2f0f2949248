# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM makes of a launch: KV cache dtype and backend, by vLLM's own code.

Needs `gpu.stand_in_for_gpu`. Reads a model's configuration, no weights and no hub.
"""

import json
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.cache import KV_CACHE_DTYPES, is_known_kv_cache_dtype
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention import sparse_mla_attention as layer_module
from vllm.model_executor.layers.attention.sparse_mla_kv_cache import kv_cache_refusal
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.attention.selector import get_attn_backend


class LaunchRefused(Exception):
    """VLLM would not start like this; the message is vLLM's, in one line."""


@dataclass(frozen=True)
class Launch:
    """What vLLM decides before it loads a model."""

    # What the layer asks for dispatch: heads over all ranks, kv_lora_rank,
    # qk_nope_head_dim, qk_rope_head_dim, v_head_dim.
    dims: tuple[int, int, int, int, int]
    index_topk: int  # keys that the indexer keeps for a query
    kv_cache_dtype: str  # as the layers get it
    decided_by: str  # what made it that
    backend: str  # attention backend
    available: bool  # whether masked MHA can run, by the layer's own question
    kv_cache_refusal: str | None  # why not, where only the KV cache dtype is in the way


@contextmanager
def _model_folder(model: str) -> Iterator[str]:
    """The folder that vLLM can read a model's configuration from.

    Raises:
        ValueError: if there is no configuration, or it is not a JSON object.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"--model must be a folder with a config.json, or that file, got {model}"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model must have a JSON object as its config, got {path}")
    if path.name == "config.json":
        yield str(path.parent)
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder, "config.json"))
        yield folder


def _explain(error: Exception) -> str:
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
    return textwrap.shorten(str(text).removeprefix("Value error, "), 240)


def resolve_launch(
    model: str, tensor_parallel_size: int, kv_cache_dtype: str
) -> Launch | None:
    """Let vLLM resolve a launch, as far as attention is concerned.

    ``model`` is its folder or `config.json`, the rest as `vllm serve` will get it. None
    if the model has no sparse MLA.

    Raises:
        ValueError: if an argument makes no sense, naming it.
        LaunchRefused: if vLLM would refuse to start.
    """
    if not is_known_kv_cache_dtype(kv_cache_dtype):
        raise ValueError(
            f"--kv-cache-dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got "
            f"{kv_cache_dtype!r}"
        )
    with _model_folder(model) as folder:
        try:
            config = EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                tensor_parallel_size=tensor_parallel_size,
                kv_cache_dtype=kv_cache_dtype,
                # Compilation passes decide nothing here, and need CUDA's operators.
                optimization_level=0,
            ).create_engine_config()
            return _resolve_attention(config, kv_cache_dtype)
        except (ValueError, NotImplementedError) as error:
            raise LaunchRefused(_explain(error)) from error


def _dims(config: VllmConfig) -> tuple[int, int, int, int, int] | None:
    """What the layer asks for dispatch; None without sparse MLA."""
    model = config.model_config
    sizes = [
        getattr(model.hf_text_config, name, None)
        for name in (
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "index_topk",
        )
    ]
    if None in sizes:
        return None
    return (model.model_arch_config.total_num_attention_heads, *sizes[:-1])


def _resolve_attention(config: VllmConfig, kv_cache_dtype: str) -> Launch | None:
    model_config = config.model_config
    hf_config = model_config.hf_text_config
    dims = _dims(config)
    if dims is None:
        return None
    configured = config.cache_config.cache_dtype
    # Some backends allocate on the GPU when they are imported.
    with set_current_vllm_config(config), FakeTensorMode():
        backend = get_attn_backend(
            hf_config.kv_lora_rank + hf_config.qk_rope_head_dim,
            model_config.dtype,
            configured,
            use_mla=True,
            use_sparse=True,
            num_heads=model_config.get_num_attention_heads(config.parallel_config),
        )
        final = mla_attention._canonicalize_sparse_mla_kv_cache_dtype(
            backend, configured
        )
        available = layer_module._is_masked_mha_available(*dims, final)
        refusal = kv_cache_refusal(final, hf_config.qk_rope_head_dim)
        otherwise = layer_module._is_masked_mha_available(*dims, "auto")
    model_dtype = str(model_config.dtype).removeprefix("torch.")

    def effective(dtype: str) -> str:
        return model_dtype if dtype == "auto" else dtype

    from_checkpoint = resolve_kv_cache_dtype_string(kv_cache_dtype, model_config)
    if final != configured:
        decided_by = f"{backend.get_name()}'s own format for {configured}"
    elif effective(configured) != effective(from_checkpoint):
        decided_by = f"vLLM's configuration of {model_config.architecture}"
    elif from_checkpoint != kv_cache_dtype:
        decided_by = "the checkpoint's quantization_config"
    elif kv_cache_dtype != "auto":
        decided_by = "--kv-cache-dtype"
    else:
        decided_by = "the model's dtype"
    return Launch(
        dims=dims,
        index_topk=hf_config.index_topk,
        kv_cache_dtype=effective(final),
        decided_by=decided_by,
        backend=backend.get_name(),
        available=available,
        kv_cache_refusal=refusal if otherwise else None,
    )

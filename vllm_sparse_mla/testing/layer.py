# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A sparse-MLA layer outside a model."""

import contextlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class Dims:
    """Dimensions of one layer on one rank; the smallest here, for the host."""

    num_heads: int = 2
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 24
    index_topk: int = 24
    kv_cache_dtype: str = "auto"

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_b_dim(self) -> int:
        """Entries of a head that the K/V projection makes: K without RoPE, and V."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def layer_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's sparse-MLA layers, but for the K/V projection."""
        return dict(
            num_heads=self.num_heads,
            head_size=self.latent_dim,
            scale=self.qk_head_dim**-0.5,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype=self.kv_cache_dtype,
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            qk_head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
        )


# Whole models, all heads of them.
DEEPSEEK = Dims(128, 512, 128, 64, 128, 2048)
GLM = Dims(64, 512, 192, 64, 256, 2048)
GLM_FLASH = Dims(64, 512, 256, 0, 256, 2048)
MODELS = {"deepseek": DEEPSEEK, "glm": GLM, "glm-flash": GLM_FLASH}


class Projection:
    """A linear layer as vLLM's: it returns the product, and no bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


def make_layer(
    cls: type, dims: Dims, kv_b_weight: torch.Tensor, config: Any = None, **kwargs: Any
) -> Any:
    """Make a layer as vLLM does on one rank, with masked MHA forced on.

    Args:
        cls: a sparse-MLA implementation class.
        dims: its dimensions.
        kv_b_weight: `[num_heads * kv_b_dim, kv_lora_rank]`.
        config: vLLM's configuration; None is one that names the device alone.
        **kwargs: further arguments of the layer, such as `topk_indices_buffer`.
    """
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    if config is None:
        device_config = DeviceConfig(device=kv_b_weight.device.type)
        config = VllmConfig(device_config=device_config)
    # No distributed set-up: the layer asks for nothing but the size.
    one_rank = {"get_tensor_model_parallel_world_size": lambda: 1}
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        for base in cls.__mro__:
            names = getattr(vars(base).get("__init__"), "__globals__", {})
            if one_rank.keys() & names.keys():
                stack.enter_context(mock.patch.dict(names, one_rank))
        layer = cls(
            **dims.layer_arguments(), kv_b_proj=Projection(kv_b_weight), **kwargs
        )
    # Whoever calls it decides what to run, whatever the device and the head count.
    layer.masked_mha_available = True
    layer._sparse_mla_force_masked_mha = True
    return layer


def project(
    dims: Dims, kv_b_weight: torch.Tensor, latents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of whole sequences, for an oracle, in the precision of `latents`.

    Of `[tokens, latent_dim]` and weights as of `make_layer`, `[tokens, num_heads,
    qk_head_dim]` and `[tokens, num_heads, v_head_dim]`.
    """
    kv = latents[:, : dims.kv_lora_rank] @ kv_b_weight.to(latents.dtype).t()
    k_nope, v = kv.unflatten(-1, (dims.num_heads, -1)).split(
        (dims.qk_nope_head_dim, dims.v_head_dim), dim=-1
    )
    k_pe = latents[:, None, dims.kv_lora_rank :].expand(-1, dims.num_heads, -1)
    return torch.cat((k_nope, k_pe), dim=-1), v

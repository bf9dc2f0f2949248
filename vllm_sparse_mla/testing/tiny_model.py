# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write a DeepSeek-V3.2-style model with random weights, without a hub.

    vllm-sparse-mla tiny-model tiny-128h OUT_DIR

The folder holds ``config.json`` and one bfloat16 ``model.safetensors`` and is
served with ``--skip-tokenizer-init`` and prompts given as token ids. Every
layer is dense (no experts). The same name and seed give the same bytes.

Weights are normal with variance ``gain**2 / fan_in``, so activations keep unit
scale. The query up-projection has gain 3: attention logits then have a standard
deviation near 3, a few keys carry most of the weight, and a key that attention
loses is seen in the output instead of vanishing in an average.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

KV_LORA_RANK = 512
QK_NOPE_HEAD_DIM = 128
QK_ROPE_HEAD_DIM = 64
V_HEAD_DIM = 128
INDEX_N_HEADS = 64
INDEX_HEAD_DIM = 128
QUERY_GAIN = 3.0


@dataclass(frozen=True)
class ModelSpec:
    """Sizes that differ between the models; the head dimensions are V3.2's.

    Attributes:
        hidden_size: Width of the residual stream.
        num_attention_heads: Heads in total, over all tensor-parallel ranks.
        q_lora_rank: Rank of the query's down-projection.
        index_topk: Keys that the indexer keeps for each query.
        num_hidden_layers: Decoder layers, all dense.
        intermediate_size: Width of the feed-forward.
        vocab_size: Token ids are ``0 .. vocab_size - 1``.
        max_position_embeddings: Longest sequence in tokens.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    index_topk: int
    num_hidden_layers: int
    intermediate_size: int
    vocab_size: int = 1024
    max_position_embeddings: int = 32768


SPECS = {
    # Few heads: never eligible for masked MHA, small enough to copy around.
    "tiny": ModelSpec(512, 16, 512, 512, 3, 512),
    # V3.2's 128 heads: eligible for masked MHA, everything else small.
    "tiny-128h": ModelSpec(512, 128, 512, 512, 2, 512),
    # V3.2's real attention, one rank of TP1 and the head count of a TP8 rank.
    "dsv32-128h": ModelSpec(7168, 128, 1536, 2048, 4, 1024),
    "dsv32-16h": ModelSpec(7168, 16, 1536, 2048, 4, 1024),
}


def get_spec(name: str) -> ModelSpec:
    """Look up a model by name; ``ValueError`` lists the names that exist."""
    if name not in SPECS:
        raise ValueError(f"name must be one of {sorted(SPECS)}, got {name!r}.")
    return SPECS[name]


def make_config(spec: ModelSpec) -> dict:
    """Contents of ``config.json``."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": 128,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_attention_heads,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "index_topk": spec.index_topk,
        "index_n_heads": INDEX_N_HEADS,
        "index_head_dim": INDEX_HEAD_DIM,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": spec.num_hidden_layers,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def iter_tensor_shapes(
    spec: ModelSpec,
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield name, shape and gain of every tensor of the checkpoint.

    A gain of 0 stands for a norm weight (ones); a bias is zeros.
    """
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    qk_head_dim = QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM
    # An embedding row is no sum: its gain makes the entries unit variance.
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden), hidden**0.5
    yield "model.norm.weight", (hidden,), 0.0
    yield "lm_head.weight", (spec.vocab_size, hidden), 1.0
    layer_tensors: list[tuple[str, tuple[int, ...], float]] = [
        ("input_layernorm.weight", (hidden,), 0.0),
        ("post_attention_layernorm.weight", (hidden,), 0.0),
        ("self_attn.q_a_proj.weight", (spec.q_lora_rank, hidden), 1.0),
        ("self_attn.q_a_layernorm.weight", (spec.q_lora_rank,), 0.0),
        (
            "self_attn.q_b_proj.weight",
            (heads * qk_head_dim, spec.q_lora_rank),
            QUERY_GAIN,
        ),
        (
            "self_attn.kv_a_proj_with_mqa.weight",
            (KV_LORA_RANK + QK_ROPE_HEAD_DIM, hidden),
            1.0,
        ),
        ("self_attn.kv_a_layernorm.weight", (KV_LORA_RANK,), 0.0),
        (
            "self_attn.kv_b_proj.weight",
            (heads * (QK_NOPE_HEAD_DIM + V_HEAD_DIM), KV_LORA_RANK),
            1.0,
        ),
        ("self_attn.o_proj.weight", (hidden, heads * V_HEAD_DIM), 1.0),
        (
            "self_attn.indexer.wq_b.weight",
            (INDEX_N_HEADS * INDEX_HEAD_DIM, spec.q_lora_rank),
            1.0,
        ),
        ("self_attn.indexer.wk.weight", (INDEX_HEAD_DIM, hidden), 1.0),
        ("self_attn.indexer.k_norm.weight", (INDEX_HEAD_DIM,), 0.0),
        ("self_attn.indexer.k_norm.bias", (INDEX_HEAD_DIM,), 0.0),
        ("self_attn.indexer.weights_proj.weight", (INDEX_N_HEADS, hidden), 1.0),
        ("mlp.gate_proj.weight", (spec.intermediate_size, hidden), 1.0),
        ("mlp.up_proj.weight", (spec.intermediate_size, hidden), 1.0),
        ("mlp.down_proj.weight", (hidden, spec.intermediate_size), 1.0),
    ]
    for layer in range(spec.num_hidden_layers):
        for name, shape, gain in layer_tensors:
            yield f"model.layers.{layer}.{name}", shape, gain


def _make_tensor(
    name: str, shape: tuple[int, ...], gain: float, seed: int
) -> torch.Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if gain == 0.0:
        return torch.ones(shape, dtype=torch.bfloat16)
    # Seeded by name, so that a tensor does not depend on those before it.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    std = gain / shape[-1] ** 0.5
    return torch.empty(shape).normal_(0.0, std, generator=generator).bfloat16()


def write_model(folder: str | Path, name: str, *, seed: int = 0) -> Path:
    """Write the model ``name`` into ``folder`` and return the folder.

    Args:
        folder: Created if missing; files of the same name are replaced.
        name: A key of ``SPECS``.
        seed: Any non-negative integer.

    Raises:
        ValueError: ``name`` is unknown.
    """
    spec = get_spec(name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        tensor_name: _make_tensor(tensor_name, shape, gain, seed)
        for tensor_name, shape, gain in iter_tensor_shapes(spec)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(make_config(spec), indent=2) + "\n")
    return folder

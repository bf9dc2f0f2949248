# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write a model like DeepSeek-V3.2 or GLM-5 with random weights, without a hub.

    vllm-sparse-mla tiny-model tiny-128h OUT_DIR

The folder holds ``config.json``, one bfloat16 ``model.safetensors`` and a
byte-level tokenizer with a chat template. The same name and seed give the same
bytes.

Weights are normal with variance ``gain**2 / fan_in``, so activations keep unit
scale. The query up-projection has gain 3: attention logits then have a standard
deviation near 3, a few keys carry most of the weight, and a key that attention
loses is seen in the output instead of vanishing in an average.

In a model with MTP layers the output projection leans towards the id after the
token at hand, in the model and in its drafts: some drafts are accepted, not all.
"""

import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_sparse_mla.testing.tiny_tokenizer import write_tokenizer

KV_LORA_RANK = 512
QK_NOPE_HEAD_DIM = 128
QK_ROPE_HEAD_DIM = 64
V_HEAD_DIM = 128
INDEX_N_HEADS = 64
INDEX_HEAD_DIM = 128
QUERY_GAIN = 3.0
EXPERT_WIDTH = 128
# Of GLM-5.3-Flash: keys that its indexer pools, and its linear attention.
INDEX_KPOOL = 16
LINEAR_HEADS = 8
LINEAR_HEAD_DIM = 128
LINEAR_CONV = 4
# Rounding may send a token to another expert; what changes then should be little.
EXPERT_GAIN = 0.25
# Half of the greedy tokens are the next id, and half of the drafts are right.
SUCCESSOR_GAIN = 0.25


@dataclass(frozen=True)
class Family:
    """What the sizes of a model's heads and the name of its class go by."""

    architecture: str
    model_type: str
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    qk_rope_head_dim: int = QK_ROPE_HEAD_DIM
    config: Mapping[str, Any] = field(default_factory=dict)


DEEPSEEK_V32 = Family(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    QK_NOPE_HEAD_DIM,
    V_HEAD_DIM,
    INDEX_N_HEADS,
)
GLM_5 = Family("GlmMoeDsaForCausalLM", "glm_moe_dsa", 192, 256, 32)
# Without its vision tower and its several residual streams.
GLM_5_3_FLASH = Family(
    "Glm5NextForCausalLM",
    "glm5_next_text",
    *(256, 256, 32, 0),
    {
        "pad_token_id": None,
        "mhc": False,
        "mla_use_nope": True,
        "indexer_rope_interleave": True,
        "index_kpool": INDEX_KPOOL,
        "linear_num_heads": LINEAR_HEADS,
        "linear_head_dim": LINEAR_HEAD_DIM,
        "linear_conv_kernel_dim": LINEAR_CONV,
    },
)


@dataclass(frozen=True)
class ModelSpec:
    """Sizes that differ between the models."""

    hidden_size: int  # width of the residual stream
    num_attention_heads: int  # heads in total, over all tensor-parallel ranks
    q_lora_rank: int  # rank of the query's down-projection
    index_topk: int  # keys that the indexer keeps for each query
    num_hidden_layers: int  # decoder layers
    intermediate_size: int  # width of the feed-forward
    vocab_size: int = 1024  # token ids are ``0 .. vocab_size - 1``
    max_position_embeddings: int = 32768  # longest sequence in tokens
    family: Family = DEEPSEEK_V32  # whose head dimensions and model class
    # Routed experts of every layer but the first; 0 leaves all dense.
    num_experts: int = 0
    num_mtp_layers: int = 0  # layers for multi-token prediction
    # A letter a layer: "F" has an indexer, "S" shares that of the layer before it, "L"
    # is linear attention (GLM-5.3-Flash alone). Empty stands for an indexer in each.
    index_topk_pattern: str = ""


SPECS = {
    # Few heads: never eligible for masked MHA, small enough to copy around.
    "tiny": ModelSpec(512, 16, 512, 512, 3, 512),
    # V3.2's 128 heads: eligible for masked MHA, everything else small.
    "tiny-128h": ModelSpec(512, 128, 512, 512, 2, 512),
    # V3.2's real attention, one rank of TP1 and the head count of a TP8 rank.
    "dsv32-128h": ModelSpec(7168, 128, 1536, 2048, 4, 1024),
    "dsv32-16h": ModelSpec(7168, 16, 1536, 2048, 4, 1024),
    # So deep that a step of thousands of tokens takes the GPU longer than the host. The
    # feed-forward is as wide as what one rank of TP8 computes of nine experts.
    "dsv32-16h-36l": ModelSpec(7168, 16, 1536, 2048, 36, 2304),
    # All that people launch: experts, MTP, and layers that share an indexer.
    "tiny-moe": ModelSpec(
        *(512, 128, 512, 512, 3, 512),
        num_experts=8,
        num_mtp_layers=1,
        index_topk_pattern="FSF",
    ),
    "tiny-glm5": ModelSpec(
        *(512, 64, 512, 512, 4, 512),
        family=GLM_5,
        num_experts=8,
        num_mtp_layers=1,
        index_topk_pattern="FFSS",
    ),
    "tiny-glm5-flash": ModelSpec(
        *(512, 64, 512, 512, 3, 512),
        family=GLM_5_3_FLASH,
        num_experts=8,
        index_topk_pattern="LFF",
    ),
}


def get_spec(name: str) -> ModelSpec:
    """Look up a model by name; ``ValueError`` lists the names that exist."""
    if name not in SPECS:
        raise ValueError(f"name must be one of {sorted(SPECS)}, got {name!r}.")
    return SPECS[name]


def make_config(spec: ModelSpec) -> dict:
    """Contents of ``config.json``."""
    family, layers = spec.family, spec.num_hidden_layers
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": spec.num_mtp_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_attention_heads,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_nope_head_dim": family.qk_nope_head_dim,
        "qk_rope_head_dim": family.qk_rope_head_dim,
        "v_head_dim": family.v_head_dim,
        "index_topk": spec.index_topk,
        "index_n_heads": family.index_n_heads,
        "index_head_dim": INDEX_HEAD_DIM,
        "n_routed_experts": spec.num_experts or 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1 if spec.num_experts else layers,
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
    if spec.num_experts:
        config |= {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }
    if family is GLM_5_3_FLASH:
        kinds = {"L": "linear_attention", "F": "indexed_attention"}
        config["layer_types"] = [kinds[letter] for letter in spec.index_topk_pattern]
        config["mlp_layer_types"] = ["dense", *["sparse"] * (layers - 1)]
    elif spec.index_topk_pattern:
        config["index_topk_pattern"] = spec.index_topk_pattern
    return config | family.config


def iter_tensor_shapes(
    spec: ModelSpec,
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield name, shape and gain of every tensor of the checkpoint.

    A gain of 0 stands for a norm weight (ones); a bias is zeros.
    """
    hidden, layers = spec.hidden_size, spec.num_hidden_layers
    # An embedding row is no sum: its gain makes the entries unit variance.
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden), hidden**0.5
    yield "model.norm.weight", (hidden,), 0.0
    yield "lm_head.weight", (spec.vocab_size, hidden), 1.0
    for layer in range(layers + spec.num_mtp_layers):
        for name, shape, gain in _layer_shapes(spec, layer):
            yield f"model.layers.{layer}.{name}", shape, gain
        if layer >= layers:
            for name, shape, gain in _mtp_shapes(spec):
                yield f"model.layers.{layer}.{name}", shape, gain


def _layer_shapes(
    spec: ModelSpec, layer: int
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden = spec.hidden_size
    yield "input_layernorm.weight", (hidden,), 0.0
    yield "post_attention_layernorm.weight", (hidden,), 0.0
    linear = spec.index_topk_pattern[layer : layer + 1] == "L"
    attention = _linear_shapes(hidden) if linear else _mla_shapes(spec, layer)
    yield from ((f"self_attn.{name}", shape, gain) for name, shape, gain in attention)
    if not spec.num_experts or layer == 0:
        yield from _mlp_shapes("mlp", hidden, spec.intermediate_size)
        return
    yield "mlp.gate.weight", (spec.num_experts, hidden), 1.0
    yield "mlp.gate.e_score_correction_bias", (spec.num_experts,), 0.0
    yield from _mlp_shapes("mlp.shared_experts", hidden, EXPERT_WIDTH)
    for expert in range(spec.num_experts):
        yield from _mlp_shapes(
            f"mlp.experts.{expert}", hidden, EXPERT_WIDTH, EXPERT_GAIN
        )


def _mla_shapes(
    spec: ModelSpec, layer: int
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden, heads, family = spec.hidden_size, spec.num_attention_heads, spec.family
    qk_head_dim = family.qk_nope_head_dim + family.qk_rope_head_dim
    kv_a_dim = KV_LORA_RANK + family.qk_rope_head_dim
    kv_b_dim = family.qk_nope_head_dim + family.v_head_dim
    index_dim = family.index_n_heads * INDEX_HEAD_DIM
    yield "q_a_proj.weight", (spec.q_lora_rank, hidden), 1.0
    yield "q_a_layernorm.weight", (spec.q_lora_rank,), 0.0
    yield "q_b_proj.weight", (heads * qk_head_dim, spec.q_lora_rank), QUERY_GAIN
    yield "kv_a_proj_with_mqa.weight", (kv_a_dim, hidden), 1.0
    yield "kv_a_layernorm.weight", (KV_LORA_RANK,), 0.0
    yield "kv_b_proj.weight", (heads * kv_b_dim, KV_LORA_RANK), 1.0
    yield "o_proj.weight", (hidden, heads * family.v_head_dim), 1.0
    if spec.index_topk_pattern[layer : layer + 1] == "S":
        return
    yield "indexer.wq_b.weight", (index_dim, spec.q_lora_rank), 1.0
    yield "indexer.wk.weight", (INDEX_HEAD_DIM, hidden), 1.0
    yield "indexer.k_norm.weight", (INDEX_HEAD_DIM,), 0.0
    yield "indexer.k_norm.bias", (INDEX_HEAD_DIM,), 0.0
    yield "indexer.weights_proj.weight", (family.index_n_heads, hidden), 1.0
    if family is GLM_5_3_FLASH:
        pool = (INDEX_KPOOL, INDEX_HEAD_DIM)
        yield "indexer.index_kpool_compress_ape", pool, 1.0
        yield "indexer.index_kpool_compress_gate", (INDEX_HEAD_DIM, hidden), 1.0


def _linear_shapes(hidden: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    width = LINEAR_HEADS * LINEAR_HEAD_DIM
    for name in "qkv":
        yield f"{name}_proj.weight", (width, hidden), 1.0
        yield f"{name}_conv1d.weight", (width, 1, LINEAR_CONV), 1.0
    yield "b_proj.weight", (LINEAR_HEADS, hidden), 1.0
    for name in "fg":
        yield f"{name}_a_proj.weight", (LINEAR_HEAD_DIM, hidden), 1.0
        yield f"{name}_b_proj.weight", (width, LINEAR_HEAD_DIM), 1.0
    yield "dt_bias", (width,), 0.0
    yield "A_log", (LINEAR_HEADS,), 1.0
    yield "o_norm.weight", (LINEAR_HEAD_DIM,), 0.0
    yield "o_proj.weight", (hidden, width), 1.0


def _mlp_shapes(
    name: str, hidden: int, width: int, gain: float = 1.0
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{name}.gate_proj.weight", (width, hidden), 1.0
    yield f"{name}.up_proj.weight", (width, hidden), 1.0
    yield f"{name}.down_proj.weight", (hidden, width), gain


def _mtp_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """What an MTP layer has besides a decoder layer's; see ``_lean_to_successors``."""
    hidden = spec.hidden_size
    yield "enorm.weight", (hidden,), 0.0
    yield "hnorm.weight", (hidden,), 0.0
    yield "eh_proj.weight", (hidden, 2 * hidden), 0.5
    yield "shared_head.norm.weight", (hidden,), 0.0


def _make_tensor(
    name: str, shape: tuple[int, ...], gain: float, seed: int
) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if gain == 0.0:
        return torch.ones(shape, dtype=torch.bfloat16)
    # Seeded by name, so that a tensor does not depend on those before it.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    std = gain / shape[-1] ** 0.5
    return torch.empty(shape).normal_(0.0, std, generator=generator).bfloat16()


def _lean_to_successors(tensors: dict[str, torch.Tensor], spec: ModelSpec) -> None:
    """Let the model, and its drafts in the same way, prefer the next id."""
    embedding, hidden = tensors["model.embed_tokens.weight"], spec.hidden_size
    lean = SUCCESSOR_GAIN * hidden**-0.5 * embedding.roll(1, dims=0)
    head = tensors["lm_head.weight"] = tensors["lm_head.weight"] + lean
    for index in range(spec.num_mtp_layers):
        prefix = f"model.layers.{spec.num_hidden_layers + index}"
        tensors[f"{prefix}.embed_tokens.weight"] = embedding.clone()
        tensors[f"{prefix}.shared_head.head.weight"] = head.clone()
        # The first half of its input is the token's embedding.
        tensors[f"{prefix}.eh_proj.weight"][:, :hidden] += torch.eye(hidden)


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
    names, *sizes = zip(*iter_tensor_shapes(spec))
    # Threads, for torch draws a tensor's numbers by one.
    with ThreadPoolExecutor() as threads:
        made = threads.map(_make_tensor, names, *sizes, itertools.repeat(seed))
        tensors = dict(zip(names, made))
    if spec.num_mtp_layers:
        _lean_to_successors(tensors, spec)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(make_config(spec), indent=2) + "\n")
    write_tokenizer(folder, spec.vocab_size)
    return folder

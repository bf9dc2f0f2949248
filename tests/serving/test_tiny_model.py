# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The random model: same bytes for a seed, and vLLM's own loader takes it."""

import hashlib
import json

import pytest

from vllm_sparse_mla.testing.tiny_model import (
    SPECS,
    get_spec,
    iter_tensor_shapes,
    make_config,
    write_model,
)

# Builds vLLM's real model, and its MTP draft, on the CPU and loads the checkpoint.
# No attention backend and no kernel for experts resolves without a GPU, so the
# attention layer's own constructor and that choice are replaced; every weight still
# belongs to vLLM's modules. Runs in a process of its own because it rebinds vLLM's
# platform and default dtype.
LOAD_SCRIPT = """
import sys
import torch
from safetensors.torch import load_file
from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)
from vllm.platforms import current_platform

store, *folders = sys.argv[1:]
current_platform.device_type = "cpu"
torch.set_default_dtype(torch.bfloat16)

def init(self, *, prefix, kv_b_proj, **kwargs):
    torch.nn.Module.__init__(self)
    self.kv_b_proj = kv_b_proj
    self.use_pcp = False
    self.kv_cache_dtype = "auto"
    self.impl = None
    self.layer_name = prefix
    for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "num_heads"):
        setattr(self, name, kwargs.get(name))

MLAAttention.__init__ = init
moe.select_unquantized_moe_backend = lambda **_: (UnquantizedMoeBackend.OOT, None)

def load(folder):
    # Numbers of parameters of the model and of its draft.
    model_config = ModelConfig(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096
    )
    assert model_config.use_mla and model_config.hf_text_config.index_topk == 512
    speculative = None
    if model_config.hf_text_config.num_nextn_predict_layers:
        speculative = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=3,
            target_model_config=model_config,
            target_parallel_config=ParallelConfig(),
        )
    config = VllmConfig(
        model_config=model_config,
        speculative_config=speculative,
        device_config=DeviceConfig(device="cpu"),
    )
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1, 1)
        if model_config.architecture == "Glm5NextForCausalLM":
            from vllm.models.glm5next import Glm5NextForCausalLM as Architecture
        else:
            from vllm.models.deepseek_v32.nvidia.model import (
                DeepseekV32ForCausalLM as Architecture,
            )
        models = [Architecture(vllm_config=config)]
        if speculative:
            from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MTP

            models.append(DeepseekV32MTP(vllm_config=config))
    weights = load_file(f"{folder}/model.safetensors")
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        loaded = model.load_weights(weights.items())
        names = {name for name, _ in model.named_parameters()}
        assert loaded == names, names ^ loaded
        assert not [n for n, p in model.named_parameters() if p.isnan().any()]
    return [len(list(model.parameters())) for model in models]

for folder in folders:
    try:
        print("loaded", *load(folder))
    except Exception as error:
        print(repr(error))
"""
# Of the model and of its draft. Beside names this counts layers without an indexer.
PARAMETERS = {
    "tiny": "45",
    "tiny-moe": "49 24",
    "tiny-glm5": "63 24",
    "tiny-glm5-flash": "57",
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "tiny")


def _sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_same_seed_gives_the_same_bytes(model_folder, tmp_path):
    again = write_model(tmp_path / "again", "tiny")
    other = write_model(tmp_path / "other", "tiny", seed=1)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert _sha256(again / file) == _sha256(model_folder / file)
    assert _sha256(other / "model.safetensors") != _sha256(
        model_folder / "model.safetensors"
    )


@pytest.fixture(scope="module")
def loaded(run_python, tmp_path_factory) -> dict[str, str]:
    """What a process says that loads one model after another."""
    folder = tmp_path_factory.mktemp("loaded")
    models = [str(write_model(folder / name, name)) for name in PARAMETERS]
    lines = run_python(
        LOAD_SCRIPT,
        str(folder / "store"),
        *models,
        folder=folder,
        VLLM_PLUGINS="",
        HF_HUB_OFFLINE="1",
    )
    return dict(zip(PARAMETERS, lines[-len(models) :], strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("name", PARAMETERS)
def test_vllm_loads_every_parameter(name, loaded):
    assert loaded[name] == f"loaded {PARAMETERS[name]}"


@pytest.mark.parametrize("name", sorted(SPECS))
def test_config_agrees_with_tensors(name):
    spec = get_spec(name)
    config = make_config(spec)
    shapes = {name: shape for name, shape, _ in iter_tensor_shapes(spec)}
    assert json.loads(json.dumps(config)) == config
    prefix = f"model.layers.{config['num_hidden_layers'] - 1}.self_attn"
    qk_head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    assert shapes[f"{prefix}.q_b_proj.weight"] == (
        config["num_attention_heads"] * qk_head_dim,
        config["q_lora_rank"],
    )
    # Where all layers are dense, the loader is never handed an expert.
    dense = config["first_k_dense_replace"] == config["num_hidden_layers"]
    assert dense is not any(".experts." in name for name in shapes)


def test_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name must be one of .* got 'huge'"):
        write_model(tmp_path, "huge")

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real engine steps without a model: vLLM's scheduler and sparse-MLA metadata.

`ScheduledRun` gives prompts to vLLM's own scheduler under a token budget and, for each
step, has a sparse-MLA backend's own builder make the metadata that a layer would get.
Nothing is loaded and no hub is asked: the model is a `config.json` in a temporary
folder.

On a CPU, `vllm_sparse_mla.check.environment.prepare_process` has to come first.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseTRTLLMMetadataBuilder,
)
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_sparse_mla.testing.layer import DEEPSEEK, Dims
from vllm_sparse_mla.testing.tiny_model import ModelSpec, make_config

DIMS = replace(DEEPSEEK, num_heads=2, index_topk=128)
LAYER_NAME = "model.layers.0.self_attn.attn"


@dataclass(frozen=True)
class Workload:
    """What is scheduled, and the attention that it is scheduled for."""

    # Tokens of each prompt; all arrive before the first step.
    prompt_lens: tuple[int, ...] = (300, 800, 517)
    token_budget: int = 512  # tokens that a step may hold (`max_num_batched_tokens`)
    # Tokens of one prompt that a step may hold (`long_prefill_token_threshold`), so
    # that several prompts are under way at once; 0 sets no limit.
    longest_piece: int = 0
    output_len: int = 4  # tokens that each request generates
    max_num_seqs: int = 4  # requests that run at the same time
    # Of the layer; by default DeepSeek-V3.2's but for heads and top-k.
    dims: Dims = DIMS
    # Longest query that the builder counts as a decode. Backends take 128 and more,
    # depending on heads and device; 1 leaves every piece of a prompt, however short, to
    # the prefill path.
    decode_threshold: int = 1
    block_size: int = 64  # tokens of a KV cache block
    max_model_len: int = 4096  # longest sequence in tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that hold every request at once, and the scheduler's null block."""
        lens = (n + self.output_len for n in self.prompt_lens)
        return 1 + sum(-(-n // self.block_size) for n in lens)


@dataclass(frozen=True)
class EngineStep:
    """One step as the scheduler planned it, in the order of the batch."""

    index: int  # number of the step, from 0
    requests: list[int]  # number of each request, its place in `Workload.prompt_lens`
    context_lens: list[int]  # tokens of each request that earlier steps computed
    query_lens: list[int]  # tokens of each request that this step computes
    metadata: Any  # what the backend's builder made of it

    @property
    def prefills(self) -> slice:
        """The batch's prefill requests; decodes come before them."""
        return slice(self.metadata.num_decodes, len(self.requests))

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Each prefill's request, and where its new tokens start and stop in it."""
        prefills = (
            values[self.prefills]
            for values in (self.requests, self.context_lens, self.query_lens)
        )
        return [(r, context, context + query) for r, context, query in zip(*prefills)]


class _Batch:
    """The part of the model runner's batch that vLLM's reordering needs."""

    def __init__(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        self.req_ids = list(output.num_scheduled_tokens)
        self.query_lens = np.array([output.num_scheduled_tokens[r] for r in self])
        # The scheduler has already counted this step's tokens as computed.
        computed = np.array([requests[r].num_computed_tokens for r in self])
        self.num_computed_tokens_cpu = computed - self.query_lens
        self.num_prompt_tokens = np.array([requests[r].num_prompt_tokens for r in self])

    def __iter__(self) -> Iterator[str]:
        return iter(self.req_ids)

    def swap_states(self, i: int, j: int) -> None:
        for values in (
            self.req_ids,
            self.query_lens,
            self.num_computed_tokens_cpu,
            self.num_prompt_tokens,
        ):
            values[i], values[j] = values[j], values[i]


class _NoDensePrefill:
    """A prefill backend for the builder; the masked path attends without one."""

    def clone(self) -> "_NoDensePrefill":
        return self

    def prepare_metadata(self, prefill: Any) -> None:
        pass


def _ensure_model_parallel() -> None:
    """Start vLLM's model-parallel groups of one rank unless there are some."""
    if torch.distributed.is_initialized():
        return
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(
            1, 0, f"file://{folder}/rendezvous", 0, backend="gloo"
        )
        initialize_model_parallel(1, 1)


def make_vllm_config(workload: Workload, device: torch.device) -> VllmConfig:
    """DeepSeek-V3.2's configuration with the workload's dimensions."""
    spec = ModelSpec(
        hidden_size=512,
        num_attention_heads=workload.dims.num_heads,
        q_lora_rank=512,
        index_topk=workload.dims.index_topk,
        num_hidden_layers=1,
        intermediate_size=512,
        max_position_embeddings=workload.max_model_len,
    )
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = make_config(spec) | {name: getattr(workload.dims, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model_config = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=workload.max_model_len,
        )
        return VllmConfig(
            model_config=model_config,
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=workload.token_budget,
                max_num_seqs=workload.max_num_seqs,
                max_model_len=workload.max_model_len,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                long_prefill_token_threshold=workload.longest_piece,
            ),
            cache_config=CacheConfig(
                block_size=workload.block_size, enable_prefix_caching=False
            ),
            device_config=DeviceConfig(device=device.type),
        )


class ScheduledRun:
    """Schedules a workload to its end, a step at a time.

    Attributes:
        workload: what is scheduled.
        device: where the metadata's tensors lie.
        vllm_config: the configuration of the run.
        builder: the backend's metadata builder.
    """

    def __init__(self, workload: Workload, device: torch.device | str = "cpu") -> None:
        """Sets up the scheduler and the builder."""
        self.workload = workload
        self.device = torch.device(device)
        self.vllm_config = make_vllm_config(workload, self.device)
        self.vllm_config.cache_config.num_gpu_blocks = workload.num_blocks
        spec = MLAAttentionSpec(
            block_size=workload.block_size,
            num_kv_heads=1,
            head_size=workload.dims.latent_dim,
            dtype=torch.bfloat16,
        )
        with set_current_vllm_config(self.vllm_config):
            _ensure_model_parallel()
            self._scheduler = Scheduler(
                self.vllm_config,
                KVCacheConfig(
                    num_blocks=workload.num_blocks,
                    kv_cache_tensors=[],
                    kv_cache_groups=[KVCacheGroupSpec([LAYER_NAME], spec)],
                ),
                StructuredOutputManager(self.vllm_config),
                block_size=workload.block_size,
            )
            layers = self.vllm_config.compilation_config.static_forward_context
            layers[LAYER_NAME] = SimpleNamespace(prefill_backend=_NoDensePrefill())
            self.builder = FlashInferMLASparseTRTLLMMetadataBuilder(
                spec, [LAYER_NAME], self.vllm_config, self.device
            )
        self.builder.reorder_batch_threshold = workload.decode_threshold
        # A long-running server's blocks are in no order; the scheduler's are here.
        generator = torch.Generator().manual_seed(0)
        self._block_order = torch.randperm(workload.num_blocks, generator=generator)

    def steps(self) -> Iterator[EngineStep]:
        """Schedule until every request has ended; usable once."""
        for number, prompt_len in enumerate(self.workload.prompt_lens):
            self._scheduler.add_request(
                Request(
                    request_id=str(number),
                    prompt_token_ids=[0] * prompt_len,
                    sampling_params=SamplingParams(
                        max_tokens=self.workload.output_len, ignore_eos=True
                    ),
                    pooling_params=None,
                )
            )
        index = 0
        while self._scheduler.requests:
            output = self._scheduler.schedule()
            if not output.num_scheduled_tokens:
                raise RuntimeError(
                    f"the scheduler planned nothing in step {index} though "
                    f"{len(self._scheduler.requests)} requests are left"
                )
            batch = _Batch(output, self._scheduler.requests)
            reorder_batch_to_split_decodes_and_prefills(
                batch, output, self.workload.decode_threshold
            )
            yield self._step(index, batch)
            self._finish(output)
            index += 1

    def _step(self, index: int, batch: _Batch) -> EngineStep:
        context_lens = torch.from_numpy(batch.num_computed_tokens_cpu)
        query_lens = torch.from_numpy(batch.query_lens)
        seq_lens = (context_lens + query_lens).int()
        query_start_loc = torch.zeros(len(batch.req_ids) + 1, dtype=torch.int32)
        torch.cumsum(query_lens, 0, out=query_start_loc[1:])
        block_table = self._block_table(batch)
        row = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
        position = torch.arange(len(row)) - query_start_loc[row] + context_lens[row]
        block_size = self.workload.block_size
        block = block_table[row, position // block_size].long()
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc.to(self.device),
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens.to(self.device),
            num_reqs=len(batch.req_ids),
            num_actual_tokens=len(row),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table.to(self.device),
            slot_mapping=(block * block_size + position % block_size).to(self.device),
            is_prefilling=context_lens < torch.from_numpy(batch.num_prompt_tokens),
            seq_lens_cpu_upper_bound=seq_lens,
        )
        with set_current_vllm_config(self.vllm_config):
            metadata = self.builder.build(0, common)
        return EngineStep(
            index=index,
            requests=[int(request) for request in batch],
            context_lens=context_lens.tolist(),
            query_lens=query_lens.tolist(),
            metadata=metadata,
        )

    def _block_table(self, batch: _Batch) -> torch.Tensor:
        width = -(-self.workload.max_model_len // self.workload.block_size)
        table = torch.zeros(len(batch.req_ids), width, dtype=torch.int32)
        for row, request in enumerate(batch):
            (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request)
            table[row, : len(blocks)] = self._block_order[blocks]
        return table

    def _finish(self, output: SchedulerOutput) -> None:
        """Tell the scheduler what the model would have: one token where one is due."""
        request_ids = list(output.num_scheduled_tokens)
        requests = [self._scheduler.requests[r] for r in request_ids]
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={r: i for i, r in enumerate(request_ids)},
                sampled_token_ids=[
                    [0] if request.num_computed_tokens >= request.num_tokens else []
                    for request in requests
                ],
            ),
        )

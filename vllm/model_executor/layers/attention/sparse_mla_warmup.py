# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start-up compilation of what the first long prompt would otherwise compile.

FA4 compiles a kernel for each combination of callback, causality and LSE (3 to 6 s
each), and others for some request counts and query lengths. They are compiled by
vLLM's JIT warm-up, or at load where ``--enforce-eager`` switches that off; only where
a prefill can take masked MHA, and if one does not compile, prefills run sparse MQA
instead.
"""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    get_mla_dims,
)
from vllm.model_executor.layers.attention.sparse_mla_choice import (
    describe_estimate,
    prefill_estimate,
)
from vllm.model_executor.layers.attention.sparse_mla_sm90 import (
    sm90_masked_mha_enabled,
)
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# Where FA4 may go over to another kernel, of whatever architecture and dimensions.
# Classes that share one for a call cost nothing: FA4 compiles it once.
_NUM_REQUESTS = (1, 2)
_QUERY_LENS = (128, 256, 8192)
# With more requests FA4 looks them up in another way, by kernels of their own.
MAX_MASKED_MHA_REQUESTS = 256

# Every threshold of vLLM's table is a multiple of it.
_LEN_STEP = 1024


@dataclass(frozen=True)
class MaskedCall:
    """One way in which ``SparseMLACommonImpl`` calls FA4."""

    offset: bool
    causal: bool
    return_lse: bool
    split: bool = False
    whole: bool = False

    @property
    def has_context(self) -> bool:
        """Whether it is made where there are cached tokens."""
        return self.return_lse or self.whole


MASKED_CALLS = (
    # Pure prefill.
    MaskedCall(offset=False, causal=True, return_lse=False),
    # Suffix and context chunks of one whole-sequence mask.
    MaskedCall(offset=True, causal=True, return_lse=True),
    MaskedCall(offset=True, causal=False, return_lse=True),
    # Suffix and context chunks with a mask for each range.
    MaskedCall(offset=False, causal=True, return_lse=True),
    MaskedCall(offset=False, causal=False, return_lse=True),
)
# What ``context_splits`` and ``takes_one_pass`` add on SM90.
_SM90_CALLS = (
    MaskedCall(offset=True, causal=False, return_lse=True, split=True),
    MaskedCall(offset=False, causal=True, return_lse=False, whole=True),
)


def masked_calls() -> tuple[MaskedCall, ...]:
    """The calls that the layer can make on this device."""
    if sm90_masked_mha_enabled():
        return (*MASKED_CALLS, *_SM90_CALLS)
    return MASKED_CALLS


def _sparse_mla_layers(vllm_config: "VllmConfig | None") -> list[MLAAttention]:
    """The model's layers that know of masked MHA, as far as they are built."""
    if vllm_config is None:
        return []
    layers = get_layers_from_vllm_config(vllm_config, MLAAttention).values()
    return [layer for layer in layers if hasattr(layer.impl, "masked_mha_available")]


def masked_mha_is_ruled_out() -> bool:
    """Whether layers are there, and masked MHA is available to none of them.

    A metadata builder is made after them, and needs no mask workspace then.
    """
    layers = _sparse_mla_layers(get_current_vllm_config_or_none())
    return bool(layers) and not any(
        layer.impl.masked_mha_available  # type: ignore[attr-defined]
        for layer in layers
    )


def _takes_masked_mha(
    layer: MLAAttention, topk: int, num_requests: int, query_len: int, seq_len: int
) -> bool:
    """Whether vLLM's dispatch sends a prefill of such requests to masked MHA.

    The workspaces are taken to be large enough.
    """
    context = None
    if seq_len > query_len:
        context = SimpleNamespace(
            chunks=[SimpleNamespace(max_seq_len=0)],
            context_lens_list=[seq_len - query_len] * num_requests,
            workspace=torch.empty(num_requests * seq_len, 1, device="meta"),
        )
    prefill = SimpleNamespace(
        max_query_len=query_len,
        query_lens_cpu=torch.tensor([query_len] * num_requests),
        chunked_context=context,
        use_dense_mha=False,
        topk_mask_workspace=torch.empty(2**48, dtype=torch.int32, device="meta"),
    )
    metadata: Any = SimpleNamespace(
        prefill=prefill, prefill_max_seq_len=seq_len, topk_tokens=topk
    )
    return layer._use_sparse_mha(metadata)


def masked_mha_query_lens(
    layer: MLAAttention, vllm_config: "VllmConfig", has_context: bool
) -> list[int]:
    """Longest queries with which a batch can take masked MHA in this layer.

    Args:
        layer: A layer of the model.
        vllm_config: The server's.
        has_context: For batches with cached tokens, or for those without.

    Returns:
        The upper end of each class of lengths that FA4 may tell apart and of which
        dispatch admits one; nothing where masked MHA cannot fire.
    """
    topk = vllm_config.model_config.hf_text_config.index_topk
    longest_seq = vllm_config.model_config.max_model_len
    longest = min(vllm_config.scheduler_config.max_num_batched_tokens, longest_seq)
    ends = [*(n for n in _QUERY_LENS if n < longest), longest]
    seq_lens = [*range(_LEN_STEP, longest_seq, _LEN_STEP), longest_seq]
    # An estimate may admit only the shortest that dense MHA does not serve.
    seq_lens.append(min(topk + 1, longest_seq))

    most_requests = min(
        vllm_config.scheduler_config.max_num_seqs, MAX_MASKED_MHA_REQUESTS
    )

    def admits(low: int, high: int) -> bool:
        # Of the queries of one sequence length, dispatch prefers the most, and of the
        # contexts of one query length the shortest.
        if has_context:
            shortest = min(max(high, topk) + 1, longest_seq)
            lens = ((min(high, n - 1), n) for n in (shortest, *seq_lens))
        else:
            lens = ((n, n) for n in (*seq_lens, high) if n <= high)
        return any(
            _takes_masked_mha(layer, topk, num_requests, query_len, seq_len)
            for query_len, seq_len in lens
            if query_len > low and seq_len > topk
            # Launches weigh less in a batch of many: what one request is too short
            # for may pay there.
            for num_requests in (1, most_requests)
        )

    return [high for low, high in pairwise((0, *ends)) if admits(low, high)]


class FA4MaskedMHAKernel(VllmJitKernel["FA4MaskedMHAKernel.CompileKey"]):
    """Compiles FA4's masked kernels without launching them."""

    @dataclass(frozen=True)
    class CompileKey:
        call: MaskedCall
        num_heads: int
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        v_head_dim: int
        dtype: torch.dtype
        num_requests: int
        query_len: int

    def get_warmup_keys(self, vllm_config: "VllmConfig") -> list[CompileKey]:
        """A key for each call, request count and length of queries of its own.

        There are more keys than kernels: for most of them FA4 finds one that is there.
        """
        dims = get_mla_dims(vllm_config.model_config)
        layers = _sparse_mla_layers(vllm_config)
        query_lens = {
            has_context: {
                query_len
                for layer in layers
                for query_len in masked_mha_query_lens(layer, vllm_config, has_context)
            }
            for has_context in (False, True)
        }
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        return [
            self.CompileKey(
                call=call,
                num_heads=vllm_config.model_config.get_num_attention_heads(
                    vllm_config.parallel_config
                ),
                qk_nope_head_dim=dims.qk_nope_head_dim,
                qk_rope_head_dim=dims.qk_rope_head_dim,
                v_head_dim=dims.v_head_dim,
                dtype=vllm_config.model_config.dtype,
                num_requests=num_requests,
                query_len=query_len,
            )
            for call in masked_calls()
            for num_requests in _NUM_REQUESTS
            if num_requests <= max_num_seqs
            for query_len in sorted(query_lens[call.has_context])
        ]

    def compile(self, compile_key: CompileKey) -> None:
        from vllm.model_executor.layers.attention.sparse_mla_mask import (
            dense_mask_mod,
            offset_dense_mask_mod,
        )
        from vllm.vllm_flash_attn.cute.interface import (
            _flash_attn_fwd,
            _make_compile_only_tensor_spec,
        )

        call = compile_key.call
        heads, v_dim = compile_key.num_heads, compile_key.v_head_dim
        qk_dim = compile_key.qk_nope_head_dim + compile_key.qk_rope_head_dim
        # V is the tail of the joint K/V projection, a strided view.
        kv_dim = compile_key.qk_nope_head_dim + v_dim
        requests, query_len = compile_key.num_requests, compile_key.query_len
        tokens = requests * query_len

        def spec(shape, dtype=compile_key.dtype, align=16, stride=None):
            return _make_compile_only_tensor_spec(shape, dtype, align, stride)

        # FA4 takes aux tensors at their natural alignment.
        aux_tensors = [spec((requests, query_len, 4), torch.int32, None)]
        if call.offset:
            aux_tensors.append(spec((requests,), torch.int32, None))
        _flash_attn_fwd(
            q=spec((tokens, heads, qk_dim)),
            k=spec((tokens, heads, qk_dim)),
            v=spec((tokens, heads, v_dim), stride=(heads * kv_dim, kv_dim, 1)),
            cu_seqlens_q=spec((requests + 1,), torch.int32, 4),
            cu_seqlens_k=spec((requests + 1,), torch.int32, 4),
            max_seqlen_q=query_len,
            # As many keys as queries, as the layer calls it for a suffix. FA4 reads no
            # more from the number of a context chunk's.
            max_seqlen_k=query_len,
            softmax_scale=qk_dim**-0.5,
            causal=call.causal,
            num_splits=2 if call.split else 1,
            return_lse=call.return_lse,
            out=spec((tokens, heads, v_dim)),
            lse=(
                spec((heads, tokens), torch.float32, 4, stride=(None, 1))
                if call.return_lse
                else None
            ),
            mask_mod=offset_dense_mask_mod if call.offset else dense_mask_mod,
            aux_tensors=aux_tensors,
            aux_tensor_leading_dims=[2, 0][: len(aux_tensors)],
            compile_only=True,
        )
        if call.split:
            self._compile_merge(compile_key)

    def _compile_merge(self, compile_key: CompileKey) -> None:
        """Compile what merges the parts of split keys, which the above leaves out."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd_combine

        tokens, heads = compile_key.query_len, compile_key.num_heads
        shape = (tokens, heads, compile_key.v_head_dim)
        # FA4 compiles for fake tensors, and launches nothing.
        with FakeTensorMode(), torch.device("cuda"):
            _flash_attn_fwd_combine(
                torch.empty(2, *shape, dtype=torch.float32),
                torch.empty(2, heads, tokens, dtype=torch.float32).transpose(-1, -2),
                torch.empty(shape, dtype=compile_key.dtype),
                torch.empty(heads, tokens, dtype=torch.float32).transpose(-1, -2),
                cu_seqlens=torch.empty(2, dtype=torch.int32),
            )


FA4_MASKED_MHA_KERNEL = FA4MaskedMHAKernel()


def masked_mha_kernels() -> tuple[VllmJitKernel, ...]:
    """What a prefill by masked MHA launches."""
    from vllm.model_executor.kernels.attention.dsa.topk_mask_cutedsl import (
        TOPK_MASK_KERNEL,
    )

    return FA4_MASKED_MHA_KERNEL, TOPK_MASK_KERNEL


class MaskedMHAWarmup(VllmJitKernel[tuple[VllmJitKernel, Any]]):
    """Compiles all of masked MHA.

    Attributes:
        failed: Something did not compile in this process, which therefore runs sparse
            MQA in place of masked MHA.
    """

    failed = False

    def get_warmup_keys(
        self, vllm_config: "VllmConfig"
    ) -> list[tuple[VllmJitKernel, Any]]:
        """Every kernel's own keys; none where masked MHA cannot fire."""
        if not FA4_MASKED_MHA_KERNEL.get_warmup_keys(vllm_config):
            return []
        return [
            (kernel, key)
            for kernel in masked_mha_kernels()
            for key in kernel.get_warmup_keys(vllm_config)
        ]

    def compile(self, compile_key: tuple[VllmJitKernel, Any]) -> None:
        if self.failed or compile_key in self._compiled_cache:
            return
        kernel, key = compile_key
        try:
            kernel.compile(key)
        except Exception:
            self.failed = True
            logger.exception(
                "Sparse MLA: a kernel of masked MHA does not compile (%s). Prefills "
                "longer than the top-k run sparse MQA in this process.",
                key,
            )
        self._compiled_cache[compile_key] = True


MASKED_MHA_WARMUP = MaskedMHAWarmup()


def _log_lengths(layer: MLAAttention, vllm_config: "VllmConfig") -> None:
    backend, impl = layer.attn_backend.get_name(), layer.impl
    estimate = prefill_estimate(
        impl.qk_head_dim,  # type: ignore[attr-defined]
        impl.v_head_dim,  # type: ignore[attr-defined]
        backend,
        impl.kv_cache_dtype,
        impl.num_heads,
        vllm_config.model_config.hf_text_config.index_topk,
    )
    if estimate is not None:
        logger.info_once(
            "Sparse MLA: prefills longer than the top-k take masked MHA where it is "
            "estimated to be faster than %s: %s.",
            backend,
            describe_estimate(estimate, vllm_config.model_config.max_model_len),
        )


def compile_before_first_prompt(kernel: VllmJitKernel) -> None:
    """Have a kernel compiled by vLLM's JIT warm-up.

    ``--enforce-eager`` switches that off, and then compiles now.
    """
    vllm_config = get_current_vllm_config_or_none()
    if (
        vllm_config is not None
        and vllm_config.model_config is not None
        and vllm_config.model_config.enforce_eager
        and not vllm_config.kernel_config.enable_jit_warmup
    ):
        kernel.warmup(vllm_config)
    else:
        kernel.register_warmup()


def prepare_masked_mha(impl: Any) -> bool:
    """Have masked MHA compiled before the first prompt, if this layer can take it.

    Args:
        impl: The attention implementation of a layer whose model is built.

    Returns:
        Whether the layer can take masked MHA at all. True if that cannot be known,
        outside a model.
    """
    vllm_config = get_current_vllm_config_or_none()
    for layer in _sparse_mla_layers(vllm_config):
        if layer.impl is not impl:
            continue
        assert vllm_config is not None
        if not any(
            masked_mha_query_lens(layer, vllm_config, has_context)
            for has_context in (False, True)
        ):
            logger.info_once(
                "Sparse MLA: masked MHA is available, but no prefill of this server "
                "can take it. Prefills longer than the top-k run sparse MQA."
            )
            return False
        _log_lengths(layer, vllm_config)
    compile_before_first_prompt(MASKED_MHA_WARMUP)
    return True

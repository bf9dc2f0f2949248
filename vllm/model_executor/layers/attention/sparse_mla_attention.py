# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Masked-MHA prefill of sparse MLA: mask shape, dispatch, layer.

Replaces its namesakes in vLLM 0.33.0's module of this name; everything else there
(metadata, metadata builder, sparse MQA) is upstream's. ``docs/design.md`` states the
contracts, ``docs/patches.md`` what differs from upstream and why. The kernels that
build masks are in ``kernels/attention/dsa``. It is as long as it is since upstream has
all this in one class.
"""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.model_executor.kernels.attention.dsa.concat_mla_k import (
    CONCAT_MLA_K_KERNEL,
    can_concat_mla_k,
    concat_mla_k,
)
from vllm.model_executor.kernels.attention.dsa.topk_mask import (
    TOPK_MASK_ALIGN_BYTES,
    build_packed_topk_mask,
    check_topk_mask_storage,
    topk_mask_view,
)
from vllm.model_executor.layers.attention import (
    _upstream_sparse_mla_attention as _upstream,
)
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonPrefillMetadata,
)
from vllm.model_executor.layers.attention.sparse_mla_choice import (
    prefill_estimate,
    step_pays,
)
from vllm.model_executor.layers.attention.sparse_mla_context import (
    context_walk,
    takes_one_pass,
    whole_sequences,
)
from vllm.model_executor.layers.attention.sparse_mla_index_sharing import (
    forget_topk_mask,
    holds_topk_mask,
    note_topk_mask,
)
from vllm.model_executor.layers.attention.sparse_mla_kv_cache import (
    check_kv_cache,
    install_quantized_kv_thresholds,
    reads_quantized_kv_cache,
)
from vllm.model_executor.layers.attention.sparse_mla_sm90 import (
    context_splits,
    sm90_masked_mha_enabled,
)
from vllm.model_executor.layers.attention.sparse_mla_warmup import (
    MASKED_MHA_WARMUP,
    MAX_MASKED_MHA_REQUESTS,
    compile_before_first_prompt,
    masked_mha_is_ruled_out,
    prepare_masked_mha,
)
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_fa_version_supported,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

logger = init_logger(__name__)

# (heads over all ranks, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
MASKED_MHA_MODEL_DIMS = (
    (128, 512, 128, 64, 128),  # DeepSeek-V3.2
    (64, 512, 192, 64, 256),  # GLM-5
    (64, 512, 256, 0, 256),  # GLM-5.3-Flash: no RoPE part
)


def _topk_mask_shape(
    batch_size: int,
    max_query_len: int,
    max_key_len: int,
    reserve_key_starts_word: bool = False,
) -> tuple[int, int, int]:
    """Shape of a bit-packed top-k mask, shared by every site that builds one.

    ``(batch, query rows, int32 words)``: rows are padded to the tile that FA4 reads
    (128 rows, 256 with two query stages), words to whole 16-byte groups.
    ``reserve_key_starts_word`` keeps the last word of a row free of keys, for
    ``offset_dense_mask_mod``.
    """
    tile_m = 128 if max_query_len <= 128 else 256
    # Not triton.cdiv, which takes the host microseconds.
    num_words = cdiv(max_key_len, 32) + int(reserve_key_starts_word)
    return (
        batch_size,
        round_up(max_query_len, tile_m),
        round_up(num_words, TOPK_MASK_ALIGN_BYTES // 4),
    )


def _is_masked_mha_available(
    num_heads_total: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    kv_cache_dtype: str,
) -> bool:
    """Check if masked MHA can ever fire for this model configuration.

    False also where the layers of the current configuration are known not to take it,
    which the metadata builder asks.
    """
    if not (
        sm90_masked_mha_enabled() or current_platform.is_device_capability_family(100)
    ):
        return False
    model_dims = (
        num_heads_total,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
    )
    if model_dims not in MASKED_MHA_MODEL_DIMS or masked_mha_is_ruled_out():
        return False
    qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
    if sm90_masked_mha_enabled():
        # vLLM selects FA3 on SM90; the masked path asks for FA4 by itself.
        fa_version = 4 if is_fa_version_supported(4) else None
    elif qk_head_dim == 256 and v_head_dim == 256:
        # This path uses contiguous K/V, so it does not need the paged-KV
        # features that keep head-dim 256 disabled in the general FA selector.
        fa_version = get_flash_attn_version()
    else:
        fa_version = get_flash_attn_version(
            head_size=qk_head_dim, head_size_v=v_head_dim
        )
    return fa_version == 4 and (
        not is_quantized_kv_cache(kv_cache_dtype)
        or reads_quantized_kv_cache(kv_cache_dtype, qk_rope_head_dim)
    )


def _build_topk_mask(
    topk_indices_per_req: list[torch.Tensor],
    q_lens: list[int],
    max_q_len: int,
    max_seq_len: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Build a bit-packed mask of all top-k keys, from one tensor of rows a request.

    The layer itself calls ``build_packed_topk_mask``, whose masks are causal, and which
    needs neither the concatenation nor the copy of the lengths to the device.

    Args:
        topk_indices_per_req: int32 ``[q_lens[b], topk]`` for each request.
        q_lens: Query rows of each request.
        max_q_len: As for ``build_packed_topk_mask``.
        max_seq_len: As for ``build_packed_topk_mask``.
        out: As for ``build_packed_topk_mask``.

    Returns:
        ``out[:len(q_lens), :max_q_len]``, never narrowed in its last dimension, so
        that every row starts on a 16-byte boundary.

    Raises:
        ValueError: Before any launch, naming the argument.
    """
    found = [len(rows) for rows in topk_indices_per_req]
    if found != list(q_lens) or max(found, default=0) > max_q_len:
        raise ValueError(
            "topk_indices_per_req must have one tensor a request, of q_lens rows and "
            f"at most max_q_len: q_lens is {q_lens}, max_q_len {max_q_len}, "
            f"the tensors have {found} rows"
        )
    check_topk_mask_storage(out, "out")
    if not found:
        return out[:0, :max_q_len]
    rows = topk_indices_per_req
    topk = rows[0] if len(rows) == 1 else torch.cat(rows)
    cu_q_lens = torch.tensor(
        [0, *itertools.accumulate(found)], dtype=torch.int32, device=out.device
    )
    # Where a request's queries stand is not known here: every key is before them.
    context_lens = torch.full_like(cu_q_lens[1:], torch.iinfo(torch.int32).max)
    return build_packed_topk_mask(
        topk, cu_q_lens, max_q_len, max_seq_len, out, context_lens=context_lens
    )


class SparseMLACommonImpl(_upstream.SparseMLACommonImpl[_upstream.T]):
    """Sparse MLA base with dense and masked-MHA prefill paths."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.masked_mha_available:
            if (
                is_quantized_kv_cache(self.kv_cache_dtype)
                and not sm90_masked_mha_enabled()
            ):
                install_quantized_kv_thresholds()
            self.masked_mha_available = prepare_masked_mha(self)
        if not self._use_flashinfer_concat_mla_k:
            compile_before_first_prompt(CONCAT_MLA_K_KERNEL)

    def masked_mha_pays(
        self, layer: MLAAttention, attn_metadata: _upstream.T, admitted: bool
    ) -> bool:
        """Whether masked MHA is the faster way for the prefills of a step.

        Args:
            layer: whose implementation this is.
            attn_metadata: the step's.
            admitted: whether vLLM's table, which is of SM100, admits the longest
                lengths. It decides where there is no estimate.
        """
        prefill = attn_metadata.prefill
        assert prefill is not None
        if prefill.use_dense_mha:
            return admitted
        admitted = admitted and not sm90_masked_mha_enabled()
        estimate = prefill_estimate(
            self.qk_head_dim,
            self.v_head_dim,
            layer.attn_backend.get_name(),
            self.kv_cache_dtype,
            self.num_heads,
            attn_metadata.topk_tokens,
        )
        return admitted if estimate is None else step_pays(prefill, estimate, admitted)

    @staticmethod
    def masked_mha_workspace_fits(prefill: MLACommonPrefillMetadata) -> bool:
        """Whether this prefill batch's top-k masks fit the workspace.

        False also for a batch that masked MHA has no kernels for.
        """
        workspace = prefill.topk_mask_workspace
        if workspace is None or prefill.query_lens_cpu is None:
            return False
        batch_size = len(prefill.query_lens_cpu)
        if MASKED_MHA_WARMUP.failed or batch_size > MAX_MASKED_MHA_REQUESTS:
            return False
        max_context_chunk_seq_len = 0
        if prefill.chunked_context is not None:
            max_context_chunk_seq_len = max(
                chunk.max_seq_len for chunk in prefill.chunked_context.chunks
            )
        fits = _upstream._masked_mha_workspace_fits(
            batch_size=batch_size,
            max_query_len=prefill.max_query_len,
            max_context_chunk_seq_len=max_context_chunk_seq_len,
            workspace_numel=workspace.numel(),
        )
        if not fits:
            logger.warning_once(
                "Sparse MLA top-k mask workspace (%d MiB) is too small for some "
                "prefill batches; those fall back to slower sparse MQA.",
                workspace.numel() * torch.int32.itemsize // (1024 * 1024),
            )
        return fits

    def _concat_k_nope_k_pe(
        self, k_nope: torch.Tensor, k_pe: torch.Tensor
    ) -> torch.Tensor:
        """K of dense and masked MHA, in one pass.

        V needs none: FA4 reads it where the projection has put it, beside K's part.
        """
        if self._use_flashinfer_concat_mla_k or not can_concat_mla_k(k_nope, k_pe):
            return super()._concat_k_nope_k_pe(k_nope, k_pe)
        return concat_mla_k(k_nope, k_pe)

    def _build_whole_topk_mask(
        self, topk: torch.Tensor, prefill: MLACommonPrefillMetadata, max_seq_len: int
    ) -> torch.Tensor | None:
        """The mask over whole sequences.

        With a context None where the workspace is too small for it, since masks of
        ranges can take its place; without, that is a ValueError.
        """
        workspace = prefill.topk_mask_workspace
        assert workspace is not None
        context = prefill.chunked_context
        batch_size = prefill.query_start_loc.shape[0] - 1
        shape = _topk_mask_shape(batch_size, prefill.max_query_len, max_seq_len)
        if context is not None and math.prod(shape) > workspace.numel():
            return None
        mask = topk_mask_view(workspace, shape)
        # What the first layer of a group finds may be of earlier rows in this place; a
        # layer without a group counts as the first of one.
        if self.index_group_index > 0 and holds_topk_mask(
            workspace, prefill, self.index_group, topk, shape
        ):
            return mask
        build_packed_topk_mask(
            topk,
            prefill.query_start_loc,
            shape[1],
            max_seq_len,
            mask,
            context_lens=None if context is None else context.context_lens,
        )
        note_topk_mask(workspace, prefill, self.index_group, topk, shape)
        return mask

    def _range_topk_mask(
        self,
        whole: torch.Tensor | None,
        topk: torch.Tensor,
        prefill: MLACommonPrefillMetadata,
        chunk: MLACommonPrefillMetadata.ContextChunk | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mask and key starts of a context chunk, or of the suffix where it is None.

        A range of the whole-sequence mask if there is one, else a mask of its own,
        whose bit 0 is the range's first key.
        """
        context = prefill.chunked_context
        assert context is not None
        if chunk is None:
            requests = tokens = slice(None)
            cu_q_lens, starts = prefill.query_start_loc, context.context_lens
            max_range_len = prefill.max_query_len
        else:
            requests, tokens = chunk.request_slice, chunk.token_slice
            cu_q_lens, starts = chunk.query_start_loc, chunk.starts
            max_range_len = chunk.max_seq_len
        if whole is not None:
            return whole[requests], starts
        workspace = prefill.topk_mask_workspace
        assert workspace is not None
        batch_size = cu_q_lens.shape[0] - 1
        shape = _topk_mask_shape(batch_size, prefill.max_query_len, max_range_len)
        mask = topk_mask_view(workspace, shape)
        forget_topk_mask(workspace)
        build_packed_topk_mask(
            topk[tokens],
            cu_q_lens,
            shape[1],
            max_range_len,
            mask,
            context_lens=context.context_lens[requests],
            range_starts=starts,
        )
        return mask, None

    def _run_masked_mha(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        mask: torch.Tensor,
        causal: bool,
        key_starts: torch.Tensor | None = None,
        return_softmax_lse: bool = False,
        out: torch.Tensor | None = None,
        num_splits: int = 1,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One FA4 call over a packed mask, read from ``key_starts[b]`` on if given.

        Raises:
            ValueError: Keys are to be split without ``key_starts``, or ``mask`` is not
                one that FA4's callbacks can read.
        """
        from vllm.model_executor.layers.attention.sparse_mla_mask import (
            dense_mask_mod,
            offset_dense_mask_mod,
        )
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        if num_splits != 1 and key_starts is None:
            # Split keys can halve SM100's column tile to 64 keys, of which
            # dense_mask_mod, that takes 128 from a multiple of 128 on, reads the second
            # half wrongly. FA4's own choice (0) may split.
            raise ValueError(f"num_splits must be 1 without key_starts: {num_splits}")
        check_topk_mask_storage(mask)
        return flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=self.scale,
            return_softmax_lse=return_softmax_lse,
            out=out,
            fa_version=4,
            num_splits=num_splits,
            mask_mod=dense_mask_mod if key_starts is None else offset_dense_mask_mod,
            aux_tensors=[mask] if key_starts is None else [mask, key_starts],
            aux_tensor_leading_dims=[2] if key_starts is None else [2, 0],
            causal=causal,
        )

    def _takes_one_pass(self, prefill: MLACommonPrefillMetadata) -> bool:
        """Whether contexts are attended to together with the new tokens.

        Those are attended to as they come, which is not how a quantized cache has them.
        """
        return (
            self.dcp_world_size == 1
            and not is_quantized_kv_cache(self.kv_cache_dtype)
            and takes_one_pass(prefill, self.num_heads)
        )

    def _attend_in_one_pass(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: _upstream.T,
        k_scale: torch.Tensor,
        mask: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend to whole sequences, whose tokens the cache has by now."""
        call = dict(mask=mask, causal=True, out=out)
        walk = whole_sequences(attn_metadata)
        self._walk(walk, lambda chunk, q: call, q, kv_c_and_k_pe_cache, k_scale)

    def _walk(
        self,
        walk: _upstream.T,
        make_call: Callable[[Any, torch.Tensor], dict[str, Any]],
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        k_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense MHA's own walk over chunks, with masked attention as its backend.

        ``make_call`` gives what `_run_masked_mha` needs for a chunk and its queries
        beside their lengths.
        """
        prefill = walk.prefill
        assert prefill is not None
        max_query_len = prefill.max_query_len

        def attend(chunk, q, k, v):
            found = self._run_masked_mha(
                q=q,
                k=k,
                v=v,
                cu_seqlens_q=chunk.query_start_loc,
                cu_seqlens_k=chunk.cu_seq_lens,
                # FA4 has kernels of its own for short queries. A chunk's longest query
                # may be short where the batch's is not, and would compile them while
                # serving.
                max_seqlen_q=max_query_len,
                max_seqlen_k=chunk.max_seq_len,
                **make_call(chunk, q),
            )
            return found if isinstance(found, tuple) else (found, None)

        backend: Any = SimpleNamespace(run_prefill_context_chunk=attend)
        prefill.prefill_backend = backend
        result = self._compute_prefill_context(q, kv_c_and_k_pe_cache, walk, k_scale)
        # What it refers to would live as long as the step.
        prefill.prefill_backend = None
        return result

    def _compute_context_mha(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: _upstream.T,
        k_scale: torch.Tensor,
        topk: torch.Tensor,
        whole_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the cached context, one workspace-sized chunk after another."""
        if self.dcp_world_size > 1:
            raise NotImplementedError(
                "Masked MHA with context does not yet support decode context "
                "parallelism"
            )
        prefill = attn_metadata.prefill
        assert prefill is not None
        walk = context_walk(attn_metadata)
        walked = walk.prefill
        assert walked is not None and walked.chunked_context is not None
        if not walked.chunked_context.chunks:
            # Only requests without query tokens have context: partials of no weight.
            num_queries, num_heads, _ = q.shape
            output = q.new_zeros(num_queries, num_heads, self.v_head_dim)
            lse = q.new_full((num_heads, num_queries), -math.inf, dtype=torch.float32)
            return output, lse

        def make_call(chunk, q):
            mask, key_starts = self._range_topk_mask(whole_mask, topk, prefill, chunk)
            num_splits = 1
            if key_starts is not None:
                num_splits = context_splits(
                    q.shape[0], key_starts.shape[0], chunk.max_seq_len, self.num_heads
                )
            return dict(
                mask=mask,
                causal=False,
                key_starts=key_starts,
                return_softmax_lse=True,
                num_splits=num_splits,
            )

        return self._walk(walk, make_call, q, kv_c_and_k_pe_cache, k_scale)

    def forward_mha(  # type: ignore[override]
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: _upstream.T,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefill with dense MHA up to ``topk_tokens`` keys, masked MHA beyond.

        Without context: one mask launch (none where a layer of the index group has
        built it) and one FA4 call into ``output``, whatever the number of requests.
        With context the same over whole sequences, gathered from the cache, where
        `takes_one_pass` says so; else one FA4 call for the suffix and one for each
        context chunk, and the merges, with one mask launch a range where the
        whole-sequence mask does not fit the workspace.
        """
        prefill = attn_metadata.prefill
        assert prefill is not None
        force_dense = getattr(self, "_sparse_mla_force_dense_mha", False)
        force_masked = getattr(self, "_sparse_mla_force_masked_mha", False)
        max_seq_len = attn_metadata.prefill_max_seq_len
        fits_topk = max_seq_len <= attn_metadata.topk_tokens
        if force_dense or (fits_topk and not force_masked):
            super(_upstream.SparseMLACommonImpl, self).forward_mha(
                q,
                kv_c_normed,
                k_pe,
                kv_c_and_k_pe_cache,
                attn_metadata,
                k_scale,
                output,
                output_scale,
            )
            return

        assert output_scale is None
        assert self.masked_mha_available
        assert self.topk_indices_buffer is not None
        if q.shape[0] == 0:
            return
        has_context = prefill.chunked_context is not None
        if has_context:
            check_kv_cache(
                kv_c_and_k_pe_cache,
                self.kv_cache_dtype,
                self.kv_lora_rank,
                self.qk_rope_head_dim,
                k_scale,
            )
        first = attn_metadata.num_decode_tokens
        topk = self.topk_indices_buffer[first : first + q.shape[0]]
        attn_out = output.view(-1, self.num_heads, self.v_head_dim)
        cu_q_lens = prefill.query_start_loc
        max_query_len = prefill.max_query_len
        mask = self._build_whole_topk_mask(
            topk, prefill, max_seq_len if has_context else max_query_len
        )
        if mask is not None and self._takes_one_pass(prefill):
            self._attend_in_one_pass(
                q, kv_c_and_k_pe_cache, attn_metadata, k_scale, mask, attn_out
            )
            return
        k, v = self._project_kv(kv_c_normed, k_pe)
        suffix = dict(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_q_lens,
            cu_seqlens_k=cu_q_lens,
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_query_len,
            causal=True,
        )
        if not has_context:
            self._run_masked_mha(**suffix, mask=mask, out=attn_out)
            return

        suffix_mask, key_starts = self._range_topk_mask(mask, topk, prefill)
        suffix_output, suffix_lse = self._run_masked_mha(
            **suffix, mask=suffix_mask, key_starts=key_starts, return_softmax_lse=True
        )
        context_output, context_lse = self._compute_context_mha(
            q, kv_c_and_k_pe_cache, attn_metadata, k_scale, topk, mask
        )
        merge_attn_states(
            output=attn_out,
            prefix_output=context_output,
            prefix_lse=context_lse,
            suffix_output=suffix_output,
            suffix_lse=suffix_lse,
        )

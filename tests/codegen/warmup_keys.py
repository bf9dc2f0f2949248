# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The subprocess of ``test_warmup_keys``: servers in, what start-up compiles out.

FA4's own code says which kernel a call needs: its caches are watched while it is called
as the layer does, on fake tensors, and while start-up compiles. Nothing is compiled:
``cute.compile`` is replaced.
"""

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

REQUESTS = (1, 2, 256, 257)
QUERY_LENS = (64, 128, 129, 256, 257, 1024, 2048, 4096, 8192, 16384)


class Cache(dict):
    """One of FA4's caches, which notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(key)
        return super().__contains__(key)


@contextmanager
def watched_caches() -> Iterator[list[Cache]]:
    from vllm.vllm_flash_attn.cute import interface

    functions = (
        interface._flash_attn_fwd,
        interface._compute_tile_cumsum,
        interface._compute_blocks_to_batch,
        interface._flash_attn_fwd_combine,
    )
    with ExitStack() as stack:
        replaced = mock.patch.object(
            interface.cute, "compile", lambda *_, **__: object()
        )
        stack.enter_context(replaced)
        for function in functions:
            stack.enter_context(mock.patch.multiple(function, compile_cache=Cache()))
        yield [function.compile_cache for function in functions]


def asked_for(caches: list[Cache]) -> set:
    return {(index, key) for index, cache in enumerate(caches) for key in cache.asked}


def call_as_the_layer_does(impl, config, masked_call, num_requests, query_len) -> None:
    """One real call of FA4, but on tensors without memory."""
    import torch

    from vllm.model_executor.layers.attention import sparse_mla_attention

    dims = config.model_config.hf_text_config
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    tokens = num_requests * query_len

    def tensor(*shape: int, dtype=torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    bf16 = torch.bfloat16
    qk_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    kv = tensor(tokens, heads, dims.qk_nope_head_dim + dims.v_head_dim, dtype=bf16)
    mask_shape = sparse_mla_attention._topk_mask_shape(
        num_requests, query_len, query_len
    )
    impl._run_masked_mha(
        q=tensor(tokens, heads, qk_dim, dtype=bf16),
        k=tensor(tokens, heads, qk_dim, dtype=bf16),
        v=kv[..., dims.qk_nope_head_dim :],
        cu_seqlens_q=tensor(num_requests + 1),
        cu_seqlens_k=tensor(num_requests + 1),
        max_seqlen_q=query_len,
        max_seqlen_k=query_len,
        mask=tensor(*mask_shape),
        causal=masked_call.causal,
        key_starts=tensor(num_requests) if masked_call.offset else None,
        return_softmax_lse=masked_call.return_lse,
        num_splits=2 if masked_call.split else 1,
        out=(
            None
            if masked_call.return_lse
            else tensor(tokens, heads, dims.v_head_dim, dtype=bf16)
        ),
    )


def needed(config) -> dict[tuple, str]:
    """FA4's key of every call that serving can make, and what the call is."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from vllm.model_executor.layers.attention import sparse_mla_warmup
    from vllm_sparse_mla.testing import served

    (layer,) = served.layers_of(config)
    scheduler, topk = config.scheduler_config, config.model_config.hf_text_config
    found: dict[tuple, str] = {}
    for num_requests, query_len in itertools.product(REQUESTS, QUERY_LENS):
        if (
            num_requests > scheduler.max_num_seqs
            or query_len > scheduler.max_num_batched_tokens
        ):
            continue
        longer = range(query_len // 64 * 64 + 64, config.model_config.max_model_len, 64)
        for has_context, seq_lens in ((False, [query_len]), (True, longer)):
            if not any(
                served.takes_masked_mha(layer, [query_len] * num_requests, seq_len)
                for seq_len in seq_lens
                if seq_len > topk.index_topk
            ):
                continue
            for masked_call in sparse_mla_warmup.masked_calls():
                if masked_call.has_context is not has_context:
                    continue
                with watched_caches() as caches, FakeTensorMode():
                    call_as_the_layer_does(
                        layer.impl, config, masked_call, num_requests, query_len
                    )
                what = f"{num_requests} requests, {query_len} queries, {masked_call}"
                found |= dict.fromkeys(asked_for(caches), what)
    return found


def without_lse(arguments: dict) -> dict:
    return arguments | dict(return_lse=False, lse=None)


def never_causal(arguments: dict) -> dict:
    return arguments | dict(causal=False)


def always_dense(arguments: dict) -> dict:
    from vllm.model_executor.layers.attention.sparse_mla_mask import dense_mask_mod

    return arguments | dict(mask_mod=dense_mask_mod)


def without_key_starts(arguments: dict) -> dict:
    names = ("aux_tensors", "aux_tensor_leading_dims")
    return arguments | {name: arguments[name][:1] for name in names}


def another_request_count(arguments: dict) -> dict:
    import torch

    from vllm.vllm_flash_attn.cute.interface import _make_compile_only_tensor_spec

    cu_seqlens = _make_compile_only_tensor_spec((258,), torch.int32, 4)
    return arguments | dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)


def compiled(config, change: Callable[[dict], dict] = dict) -> set:
    """FA4's key of everything that start-up compiles.

    Args:
        change: What a wrong body of ``FA4MaskedMHAKernel.compile`` makes of the
            arguments that the right one calls FA4 with.
    """
    from vllm.model_executor.layers.attention import sparse_mla_warmup
    from vllm.vllm_flash_attn.cute import interface

    kernel = sparse_mla_warmup.FA4_MASKED_MHA_KERNEL
    with watched_caches() as caches:
        forward = interface._flash_attn_fwd

        @functools.wraps(forward)
        def changed(**arguments):
            return forward(**change(arguments))

        with mock.patch.object(interface, "_flash_attn_fwd", changed):
            for key in kernel.get_warmup_keys(config):
                kernel.compile(key)
        return {(index, key) for index, cache in enumerate(caches) for key in cache}


def main(arch: str, servers: dict, sabotage: list[str], sabotaged: list[str]) -> None:
    """Answer, as one line of JSON, for each of ``servers``.

    Args:
        arch: target that is compiled for.
        servers: their configurations, by name.
        sabotage: names of wrong bodies of ``FA4MaskedMHAKernel.compile``.
        sabotaged: servers that the wrong bodies are tried for.
    """
    # What libraries print must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm_sparse_mla.codegen.callbacks import put_overlay_in_force
    from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module

    package = install_parent_module()
    put_overlay_in_force()
    from vllm.model_executor.layers.attention import (
        sparse_mla_attention,
        sparse_mla_sm90,
    )
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    from vllm_sparse_mla.testing import served

    package.flash_attn_varlen_func = flash_attn_varlen_func
    family = 90 if arch.startswith("sm_90") else 100
    sparse_mla_sm90.current_platform = SimpleNamespace(
        is_device_capability_family=lambda asked: asked == family
    )
    if family == 90:
        sparse_mla_sm90._opted_in = lambda: True
        sparse_mla_sm90.num_compute_units = lambda: 132
    # A fake tensor has no address to check.
    sparse_mla_attention.check_topk_mask_storage = lambda mask: None
    result = {}
    for server, options in servers.items():
        config = served.server_config(**options)
        calls, keys = needed(config), compiled(config)
        result[server] = dict(
            calls=len(calls),
            kernels=len(keys),
            missing=[what for key, what in calls.items() if key not in keys],
            superfluous=len(keys - calls.keys()),
            sabotage={
                body: len(calls.keys() - compiled(config, globals()[body]))
                for body in (sabotage if server in sabotaged else ())
            },
        )
    print(json.dumps(result), file=answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:]))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Batches of prefills in vLLM's grammar, and those that the benchmarks measure.

A batch is made of segments ``COUNTqQUERIESsTOKENS``: so many requests with so many new
tokens each, of so many tokens with what is cached. ``q4096,30q16s14016`` is a prompt of
4096 tokens beside thirty continuations of 16 tokens over 14,000 cached ones. Without a
count it is one request, without ``s`` nothing is cached, and ``k`` multiplies by 1024.
vLLM's attention benchmarks separate segments by ``_``, which is taken as well.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_SEGMENT = re.compile(r"(\d+)?q(\d+)(k?)(?:s(\d+)(k?))?")


@dataclass(frozen=True)
class Batch:
    """The prefills of one step."""

    text: str  # as it was given
    # New tokens and cached tokens of each, in the order in which vLLM lays out a batch:
    # requests that have cached tokens first.
    requests: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return self.text

    @property
    def query_lens(self) -> list[int]:
        return [queries for queries, _ in self.requests]

    @property
    def context_lens(self) -> list[int]:
        return [context for _, context in self.requests]

    @property
    def seq_lens(self) -> list[int]:
        return [sum(request) for request in self.requests]


def parse_batch(text: str) -> Batch:
    """A batch from its text.

    Raises:
        ValueError: not of the grammar, or a request without new tokens or with fewer
            tokens in all than new ones.
    """
    requests: list[tuple[int, int]] = []
    for segment in re.split("[,_]", text):
        found = _SEGMENT.fullmatch(segment)
        if found is None:
            raise ValueError(
                f"a batch must be made of segments like q4096 and 30q16s14016, got "
                f"{segment!r} in {text!r}"
            )
        count, queries, query_k, tokens, tokens_k = found.groups()
        query_len = int(queries) * (1024 if query_k else 1)
        seq_len = int(tokens) * (1024 if tokens_k else 1) if tokens else query_len
        number = int(count or 1)
        if not number or not 0 < query_len <= seq_len:
            raise ValueError(
                "a batch must have requests of at least one new token and no fewer "
                f"tokens than that, got {segment!r} in {text!r}"
            )
        requests += [(query_len, seq_len - query_len)] * number
    return Batch(text, tuple(sorted(requests, key=lambda request: request[1] == 0)))


# What people serve: a new prompt alone and beside continuations (of 16 tokens, which
# many a step of vLLM runs as decodes, and of 129, which none does at 16 heads), equal
# prompts, a long context in chunks of 8192, short suffixes over a shared prefix.
MIXES = (
    *("q4096", "q4096,4q16s14016", "q4096,16q16s14016", "q4096,30q16s14016"),
    *("q4096,4q129s14129", "q4096,16q129s14129", "q4096,30q129s8321"),
    *("8q2560", "8q4096"),
    *("q8k", "q8ks16k", "q8ks24k", "q8ks32k"),
    *("16q256s8448", "30q129s8321", "8q512s16896"),
)
MIX_RANKS = {"deepseek": (128, 64, 16), "glm": (64, 8)}

_FIT_HEADS = {"deepseek": (8, 16, 32, 64, 128), "glm": (8, 16, 32, 64)}
_FIT_TOPK = (2048, 1024, 512)
_FIT_BATCHES = (
    *("q2304", "q3000", "q4096", "q6000", "q8192", "q12000", "q16384", "q24576"),
    *("4q2200", "8q2560", "3q5000", "2q8192", "q8000,6q700", "12q2100"),
    *("q512s8192", "q1024s4096", "q2048s4096", "q1500s6000", "q4096s8192"),
    *("q1000s16000", "q2048s16384", "q4096s12288", "q8192s16384", "q8192s32768"),
    *("q300s3000", "q2048s40960", "q4096s65536", "q600s100000"),
    *("q4096,4q16s14016", "q4096,16q16s14016", "q4096,12q129s6000"),
    *("q4096,30q129s8321", "q8192,3q600s9000", "q3000,q2000s12000"),
    *("16q256s8448", "30q129s4225", "8q512s16896", "4q1024s9216", "2q4096s12288"),
    *("64q64s4160", "6q2000s4000", "3q3000s20000", "q256s2560,2q2048s3072"),
)


def fit_cases() -> Iterator[tuple[str, int, int, Batch]]:
    """Model, heads, top-k and batch of the cases that coefficients are fitted to.

    Every batch comes with two head counts of each model, so that together they cover
    every pair of head count and top-k.
    """
    for model, heads in _FIT_HEADS.items():
        for number, text in enumerate(_FIT_BATCHES):
            batch = parse_batch(text)
            for turn in range(2):
                count = heads[(number + turn * (len(heads) // 2)) % len(heads)]
                topk = _FIT_TOPK[(number + number // len(_FIT_TOPK) + turn) % 3]
                if max(batch.seq_lens) > topk:
                    yield model, count, topk, batch


def mix_cases() -> Iterator[tuple[str, int, int, Batch]]:
    """Model, heads, top-k and batch of the mixes."""
    for model, heads in MIX_RANKS.items():
        for count, text in itertools.product(heads, MIXES):
            yield model, count, _FIT_TOPK[0], parse_batch(text)

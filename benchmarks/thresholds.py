# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From timed layer steps to the prefill lengths at which masked MHA is worth taking.

Rows are those of benchmark_masked_prefill.py, just measured or read from its CSV.
"""

import math
from collections.abc import Sequence
from pprint import pformat

from prefill_batches import Batch, parse_batch

MASKED = "masked MHA"
STOCK_MASKED = "stock masked MHA"
RATIO = f"this / {MASKED}"
MARGIN = 1.05  # sparse MQA must take at least this many times as long
TOPK = 2048  # up to here dense MHA serves a prefill, whatever the table says

Ranges = tuple[tuple[int, int], ...]
Table = dict[tuple[int, int], dict[str, dict[int, tuple[Ranges, Ranges]]]]


def _is_one_request(row: dict) -> bool:
    """Whether a row is one that says something about lengths, at the usual top-k."""
    batch = row.get("batch")
    return batch is None or (
        len(parse_batch(batch).requests) == 1 and int(row["top-k"]) == TOPK
    )


def _ratios(rows: Sequence[dict]) -> dict[tuple, dict[tuple[int, int], float]]:
    """By (dims, backend, ranks): ratio by (tokens of the sequence, queries)."""
    found: dict[tuple, dict[tuple[int, int], float]] = {}
    for row in rows:
        if row["way"] in (MASKED, STOCK_MASKED) or not _is_one_request(row):
            continue
        dims = tuple(map(int, row["dims"].split("/")))
        queries = int(row["queries"])
        place = (queries + int(row["context"]), queries)
        key = (dims, row["way"], int(row["ranks"]))
        found.setdefault(key, {})[place] = float(row[RATIO])
    return dict(sorted(found.items()))


def derive_thresholds(rows: Sequence[dict]) -> Table:
    """The table that ``sparse_mla_sm90`` holds.

    Masked MHA wins where sparse MQA takes `MARGIN` times as long. A pure prefill is
    admitted up to the longest measured length at and below which it always won. With
    context, a sequence length admits the query lengths from the shortest measured one
    on from which it always won, as long as it won for some.

    Args:
        rows: of any number of models, backends and tensor-parallel sizes.
    """
    table: Table = {}
    for (dims, backend, ranks), ratios in _ratios(rows).items():
        wins = {place: ratio >= MARGIN for place, ratio in ratios.items()}
        longest = 0
        for keys, queries in sorted(wins):
            if keys == queries and keys > TOPK:
                if not wins[keys, queries]:
                    break
                longest = keys
        context = []
        for keys in sorted({keys for keys, queries in wins if keys != queries}):
            shortest = None
            for queries in sorted((q for k, q in wins if k == keys != q), reverse=True):
                if not wins[keys, queries]:
                    break
                shortest = queries
            if shortest is None:
                break
            context.append((keys, shortest))
        pure = ((longest, 0),) if longest else ()
        sizes = table.setdefault(dims, {}).setdefault(backend, {})
        sizes[ranks] = (pure, tuple(context))
    return table


def table_admits(
    table: Table, dims: str, backend: str, ranks: int, batch: Batch
) -> bool:
    """Whether masked MHA runs by the table, asked as vLLM asks it.

    That is by the longest query and the longest sequence alone.
    """
    key = tuple(map(int, dims.split("/")))
    pure, context = table.get(key, {}).get(backend, {}).get(ranks, ((), ()))
    longest = max(batch.seq_lens)
    for max_seq_len, min_query_len in context if any(batch.context_lens) else pure:
        if longest <= max_seq_len:
            return max(batch.query_lens) >= min_query_len
    return False


def to_source(table: Table) -> str:
    """The table as Python, for people."""
    return pformat(table, width=88, sort_dicts=False)


def crossovers(rows: Sequence[dict]) -> list[dict]:
    """Where pure prefills of both ways would take the same time, in tokens.

    Interpolated between measured lengths, on logarithmic scales.
    """
    table = []
    for (dims, backend, ranks), ratios in _ratios(rows).items():
        pure = sorted((k, ratio) for (k, q), ratio in ratios.items() if k == q)
        if not pure:
            continue
        text = f"above {pure[-1][0]}" if pure[-1][1] > 1 else f"below {pure[0][0]}"
        for (short, high), (long, low) in zip(pure, pure[1:]):
            if high > 1 >= low:
                share = math.log(high) / (math.log(high) - math.log(low))
                text = str(round(short * (long / short) ** share))
                break
        table.append(
            {
                "dims": "/".join(map(str, dims)),
                "ranks": ranks,
                "backend": backend,
                "tokens": text,
            }
        )
    return table

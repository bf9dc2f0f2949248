# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill lengths at which masked MHA is worth taking, as vLLM's tables have them.

Rows are those of benchmark_masked_prefill.py, just measured or read from its CSV.
"""

import math
from collections.abc import Sequence

from prefill_batches import Batch, parse_batch

MASKED = "masked MHA"
STOCK_MASKED = "stock masked MHA"
RATIO = f"this / {MASKED}"
TOPK = 2048  # up to here dense MHA serves a prefill, whatever the table says

Ranges = tuple[tuple[int, int], ...]
Table = dict[tuple[int, int], dict[str, dict[int, tuple[Ranges, Ranges]]]]

# What the Hopper opt-in had before the estimate: (qk_head_dim, v_head_dim) -> attention
# backend -> tensor-parallel size -> ranges (longest sequence, least number of queries)
# for a pure prefill and for one with context. Made from masked-prefill-h200*.csv: where
# sparse MQA takes at least 1.05 times as long.
HOPPER_TABLE: Table = {
    (192, 128): {
        "FLASH_ATTN_MLA_SPARSE": {
            1: (((8192, 0),), ((4096, 2048),)),
            2: (((8192, 0),), ((4096, 2048),)),
            4: (((16384, 0),), ((4096, 1024), (8192, 2048))),
            8: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 2048))),
        },
        "FLASHMLA_SPARSE": {
            1: (((16384, 0),), ((4096, 1024),)),
            2: (((16384, 0),), ((4096, 1024),)),
            4: (((32768, 0),), ((4096, 1024), (8192, 2048), (16384, 8192))),
            8: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 2048))),
        },
    },
    (256, 256): {
        "FLASH_ATTN_MLA_SPARSE": {
            1: (((4096, 0),), ()),
            2: (((16384, 0),), ((4096, 1024), (8192, 4096))),
            4: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 4096))),
            8: (
                ((32768, 0),),
                ((4096, 1024), (8192, 1024), (16384, 2048), (32768, 8192)),
            ),
        },
        "FLASHMLA_SPARSE": {
            1: (((8192, 0),), ((4096, 2048),)),
            2: (((16384, 0),), ((4096, 1024), (8192, 4096))),
            4: (((32768, 0),), ((4096, 1024), (8192, 1024), (16384, 4096))),
            8: (
                ((32768, 0),),
                ((4096, 1024), (8192, 1024), (16384, 2048), (32768, 4096)),
            ),
        },
    },
}


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


def _is_pure_prefill(row: dict) -> bool:
    """Whether a row is of one prompt without context, at the usual top-k."""
    usual = int(row.get("top-k", TOPK)) == TOPK
    alone = len(parse_batch(row.get("batch") or "q1").requests) == 1
    return usual and alone and not int(row["context"])


def crossovers(rows: Sequence[dict]) -> list[dict]:
    """Where pure prefills of both ways would take the same time, in tokens.

    Interpolated between measured lengths, on logarithmic scales.
    """
    found: dict[tuple, dict[int, float]] = {}
    for row in rows:
        if row["way"] not in (MASKED, STOCK_MASKED) and _is_pure_prefill(row):
            key = (row["dims"], row["way"], int(row["ranks"]))
            found.setdefault(key, {})[int(row["queries"])] = float(row[RATIO])
    table = []
    for (dims, backend, ranks), ratios in sorted(found.items()):
        pure = sorted(ratios.items())
        text = f"above {pure[-1][0]}" if pure[-1][1] > 1 else f"below {pure[0][0]}"
        for (short, high), (long, low) in zip(pure, pure[1:]):
            if high > 1 >= low:
                share = math.log(high) / (math.log(high) - math.log(low))
                text = str(round(short * (long / short) ** share))
                break
        case = {"dims": dims, "ranks": ranks, "backend": backend}
        table.append(case | {"tokens": text})
    return table

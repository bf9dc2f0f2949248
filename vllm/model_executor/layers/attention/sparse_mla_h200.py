# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Coefficients of the prefill estimate, measured on an H200.

Written by ``fit_estimate.py``; ``docs/results/prefill-choice-h200.md`` has the
measurements, and how far off the estimates are.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.sparse_mla_estimate import Costs

COSTS: "Costs" = {
    "gpu": "NVIDIA H200",
    "multiprocessors": 132,
    "max_splits": 1,
    "microseconds": {
        "192/128": {
            "FLASHMLA_SPARSE": {
                "auto": {
                    "launches": 36.59,
                    "tokens x heads": 0.001374,
                    "tokens x head tiles": 0.02574,
                    "slots x head tiles": 1.935e-05,
                    "pairs x head tiles": 0.0001933,
                    "far blocks x head tiles": 7.24e-06,
                    "tokens of all sequences": 0.0,
                },
                "fp8_ds_mla": {
                    "launches": 41.53,
                    "tokens x heads": 0.0,
                    "tokens x head tiles": 0.1531,
                    "slots x head tiles": 2.913e-05,
                    "pairs x head tiles": 0.0001791,
                    "far blocks x head tiles": 5.725e-06,
                    "tokens of all sequences": 0.0005963,
                },
            },
            "FLASHMLA_SPARSE, fewer than 32 heads": {
                "fp8_ds_mla": {
                    "launches": 49.7,
                    "tokens x heads": 0.003069,
                    "tokens x head tiles": 0.06849,
                    "slots x head tiles": 0.0003553,
                    "pairs x head tiles": 2.193e-05,
                    "far blocks x head tiles": 1.321e-06,
                    "tokens of all sequences": 0.0,
                }
            },
            "FLASH_ATTN_MLA_SPARSE": {
                "auto": {
                    "launches": 58.24,
                    "tokens x heads": 0.001292,
                    "tokens x head tiles": 0.01203,
                    "slots x head tiles": 1.901e-05,
                    "pairs x head tiles": 0.0001736,
                    "far blocks x head tiles": 1.297e-05,
                    "tokens of all sequences": 9.392e-05,
                }
            },
            "masked MHA": {
                "auto": {
                    "launches": 21.0,
                    "new tokens x heads": 0.001204,
                    "suffix blocks": 1.818,
                    "chunks": 22.62,
                    "cached tokens": 0.001012,
                    "cached tokens x heads": 0.0008401,
                    "context blocks": 2.028,
                    "merged tokens x heads": 0.0006325,
                },
                "fp8_ds_mla": {
                    "launches": 21.04,
                    "new tokens x heads": 0.001216,
                    "suffix blocks": 1.761,
                    "chunks": 20.1,
                    "cached tokens": 0.001085,
                    "cached tokens x heads": 0.0008283,
                    "context blocks": 2.013,
                    "merged tokens x heads": 0.0006123,
                },
            },
        },
        "256/256": {
            "FLASHMLA_SPARSE": {
                "auto": {
                    "launches": 33.98,
                    "tokens x heads": 0.001603,
                    "tokens x head tiles": 0.02503,
                    "slots x head tiles": 1.81e-05,
                    "pairs x head tiles": 0.0001952,
                    "far blocks x head tiles": 8.528e-06,
                    "tokens of all sequences": 2.837e-05,
                },
                "fp8_ds_mla": {
                    "launches": 47.93,
                    "tokens x heads": 0.0,
                    "tokens x head tiles": 0.1654,
                    "slots x head tiles": 6.072e-06,
                    "pairs x head tiles": 0.0002089,
                    "far blocks x head tiles": 8.521e-06,
                    "tokens of all sequences": 0.0003793,
                },
            },
            "FLASHMLA_SPARSE, fewer than 32 heads": {
                "fp8_ds_mla": {
                    "launches": 41.63,
                    "tokens x heads": 0.00293,
                    "tokens x head tiles": 0.07864,
                    "slots x head tiles": 0.00036,
                    "pairs x head tiles": 9.212e-06,
                    "far blocks x head tiles": 3.973e-06,
                    "tokens of all sequences": 0.0,
                }
            },
            "FLASH_ATTN_MLA_SPARSE": {
                "auto": {
                    "launches": 45.18,
                    "tokens x heads": 0.001424,
                    "tokens x head tiles": 0.01479,
                    "slots x head tiles": 7.458e-06,
                    "pairs x head tiles": 0.0001923,
                    "far blocks x head tiles": 1.208e-05,
                    "tokens of all sequences": 9.741e-05,
                }
            },
            "masked MHA": {
                "auto": {
                    "launches": 19.2,
                    "new tokens x heads": 0.001701,
                    "suffix blocks": 2.955,
                    "chunks": 23.49,
                    "cached tokens": 0.000599,
                    "cached tokens x heads": 0.001305,
                    "context blocks": 2.918,
                    "merged tokens x heads": 0.001185,
                },
                "fp8_ds_mla": {
                    "launches": 19.64,
                    "new tokens x heads": 0.001739,
                    "suffix blocks": 2.849,
                    "chunks": 26.31,
                    "cached tokens": 0.0003928,
                    "cached tokens x heads": 0.001294,
                    "context blocks": 2.912,
                    "merged tokens x heads": 0.001003,
                },
            },
        },
    },
}

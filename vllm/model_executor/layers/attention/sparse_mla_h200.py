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
    "max_splits": 32,
    "one_pass": True,
    "microseconds": {
        "192/128": {
            "FLASHMLA_SPARSE": {
                "auto": {
                    "launches": 34.33,
                    "tokens x heads": 0.001443,
                    "tokens x head tiles": 0.02341,
                    "slots x head tiles": 1.975e-05,
                    "pairs x head tiles": 0.0001948,
                    "far blocks x head tiles": 8.811e-06,
                    "tokens of all sequences": 5.636e-06,
                },
                "fp8_ds_mla": {
                    "launches": 36.31,
                    "tokens x heads": 0.0,
                    "tokens x head tiles": 0.1512,
                    "slots x head tiles": 3.74e-05,
                    "pairs x head tiles": 0.0001762,
                    "far blocks x head tiles": 5.162e-06,
                    "tokens of all sequences": 0.0007934,
                },
            },
            "FLASHMLA_SPARSE, fewer than 32 heads": {
                "fp8_ds_mla": {
                    "launches": 49.04,
                    "tokens x heads": 0.002789,
                    "tokens x head tiles": 0.06812,
                    "slots x head tiles": 0.0003543,
                    "pairs x head tiles": 2.677e-05,
                    "far blocks x head tiles": 1.903e-06,
                    "tokens of all sequences": 0.0,
                }
            },
            "FLASH_ATTN_MLA_SPARSE": {
                "auto": {
                    "launches": 56.45,
                    "tokens x heads": 0.001343,
                    "tokens x head tiles": 0.009557,
                    "slots x head tiles": 1.943e-05,
                    "pairs x head tiles": 0.0001764,
                    "far blocks x head tiles": 1.435e-05,
                    "tokens of all sequences": 0.0001061,
                }
            },
            "masked MHA": {
                "auto": {
                    "launches": 19.74,
                    "new tokens x heads": 0.0009336,
                    "suffix blocks": 1.809,
                    "chunks": 34.46,
                    "cached tokens": 0.0008071,
                    "cached tokens x heads": 0.0005936,
                    "context blocks": 1.887,
                    "merged tokens x heads": 0.0004979,
                },
                "fp8_ds_mla": {
                    "launches": 19.23,
                    "new tokens x heads": 0.0009346,
                    "suffix blocks": 1.773,
                    "chunks": 29.39,
                    "cached tokens": 0.0008018,
                    "cached tokens x heads": 0.0005849,
                    "context blocks": 1.96,
                    "merged tokens x heads": 0.0005191,
                },
            },
        },
        "256/256": {
            "FLASHMLA_SPARSE": {
                "auto": {
                    "launches": 35.47,
                    "tokens x heads": 0.001696,
                    "tokens x head tiles": 0.02319,
                    "slots x head tiles": 2.287e-05,
                    "pairs x head tiles": 0.0001894,
                    "far blocks x head tiles": 9.337e-06,
                    "tokens of all sequences": 3.696e-05,
                },
                "fp8_ds_mla": {
                    "launches": 38.81,
                    "tokens x heads": 0.0,
                    "tokens x head tiles": 0.1602,
                    "slots x head tiles": 1.199e-05,
                    "pairs x head tiles": 0.000214,
                    "far blocks x head tiles": 3.991e-06,
                    "tokens of all sequences": 0.0009316,
                },
            },
            "FLASHMLA_SPARSE, fewer than 32 heads": {
                "fp8_ds_mla": {
                    "launches": 40.88,
                    "tokens x heads": 0.002724,
                    "tokens x head tiles": 0.08008,
                    "slots x head tiles": 0.0003517,
                    "pairs x head tiles": 2.101e-05,
                    "far blocks x head tiles": 4.536e-06,
                    "tokens of all sequences": 0.0,
                }
            },
            "FLASH_ATTN_MLA_SPARSE": {
                "auto": {
                    "launches": 45.65,
                    "tokens x heads": 0.00154,
                    "tokens x head tiles": 0.01129,
                    "slots x head tiles": 8.972e-06,
                    "pairs x head tiles": 0.0001913,
                    "far blocks x head tiles": 1.374e-05,
                    "tokens of all sequences": 0.0001213,
                }
            },
            "masked MHA": {
                "auto": {
                    "launches": 18.59,
                    "new tokens x heads": 0.001361,
                    "suffix blocks": 2.965,
                    "chunks": 37.41,
                    "cached tokens": 0.0008716,
                    "cached tokens x heads": 0.000978,
                    "context blocks": 2.946,
                    "merged tokens x heads": 0.0001403,
                },
                "fp8_ds_mla": {
                    "launches": 18.07,
                    "new tokens x heads": 0.001375,
                    "suffix blocks": 2.882,
                    "chunks": 30.31,
                    "cached tokens": 0.000723,
                    "cached tokens x heads": 0.0009675,
                    "context blocks": 2.981,
                    "merged tokens x heads": 0.0005747,
                },
            },
        },
    },
}

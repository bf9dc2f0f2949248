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
                    "launches": 33.94,
                    "tokens x heads": 0.001445,
                    "tokens x head tiles": 0.02378,
                    "slots x head tiles": 2.102e-05,
                    "pairs x head tiles": 0.0001928,
                    "far blocks x head tiles": 8.364e-06,
                    "tokens of all sequences": 4.945e-05,
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
                    "launches": 55.05,
                    "tokens x heads": 0.001341,
                    "tokens x head tiles": 0.009943,
                    "slots x head tiles": 1.64e-05,
                    "pairs x head tiles": 0.0001811,
                    "far blocks x head tiles": 1.317e-05,
                    "tokens of all sequences": 0.0001069,
                }
            },
            "masked MHA": {
                "auto": {
                    "launches": 18.71,
                    "new tokens x heads": 0.0009564,
                    "suffix blocks": 1.8,
                    "chunks": 27.9,
                    "cached tokens": 0.0008978,
                    "cached tokens x heads": 0.0005861,
                    "context blocks": 2.032,
                    "merged tokens x heads": 0.0005167,
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
                    "launches": 32.21,
                    "tokens x heads": 0.001693,
                    "tokens x head tiles": 0.02211,
                    "slots x head tiles": 2.009e-05,
                    "pairs x head tiles": 0.0001959,
                    "far blocks x head tiles": 9.363e-06,
                    "tokens of all sequences": 7.317e-05,
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
                    "launches": 43.34,
                    "tokens x heads": 0.001531,
                    "tokens x head tiles": 0.01062,
                    "slots x head tiles": 9.609e-06,
                    "pairs x head tiles": 0.0001937,
                    "far blocks x head tiles": 1.287e-05,
                    "tokens of all sequences": 0.0001555,
                }
            },
            "masked MHA": {
                "auto": {
                    "launches": 17.89,
                    "new tokens x heads": 0.00134,
                    "suffix blocks": 2.996,
                    "chunks": 28.13,
                    "cached tokens": 0.000839,
                    "cached tokens x heads": 0.0009733,
                    "context blocks": 2.972,
                    "merged tokens x heads": 0.0009135,
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

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the packed mask compiles to inside FA4's SM90 kernel; no GPU needed.

Bounds are over the unmasked kernel of the same variant. Counts beside them were seen
with vLLM 0.33.0, nvidia-cutlass-dsl 4.8.0 and the ptxas inside it.
"""

import pytest

from vllm_sparse_mla.codegen import CodegenError, Variant, compile_variants

pytestmark = [pytest.mark.codegen, pytest.mark.timeout(3600)]

ARCH = "sm_90a"
ROWS = 2  # rows of a tile that one thread of the MMA holds
DENSE = Variant(callback="dense", lse=False)
DENSE_256 = Variant(256, 256, callback="dense", lse=False)
SCALAR = Variant(callback="word32_scalar", lse=False)
VARIANTS = {
    "dense": DENSE,
    "dense-causal": Variant(causal=True, callback="dense", lse=False),
    "offset": Variant(callback="offset", lse=False),
    "offset-key-starts-causal": Variant(
        causal=True, callback="offset", lse=False, key_starts=True
    ),
    "dense-256": DENSE_256,
    "offset-256": Variant(256, 256, callback="offset", lse=False),
    "dense-256-causal": Variant(256, 256, causal=True, callback="dense", lse=False),
    "scalar": SCALAR,
}


def params(*rows: tuple) -> list:
    """Parameters that begin with the name of a variant."""
    return [pytest.param(*row, id=row[0]) for row in rows]


@pytest.fixture(scope="module")
def records():
    return dict(zip(VARIANTS, compile_variants(list(VARIANTS.values()), arch=ARCH)))


@pytest.mark.parametrize("name", VARIANTS)
def test_targets_sm90a_without_local_memory(records, name):
    record = records[name]
    assert record.target == ARCH
    assert record.cubin_bytes > 0
    assert record.local_opcodes == 0
    assert record.local_bytes == 0


@pytest.mark.parametrize(
    "name, loads_a_row",
    params(
        ("dense", 1),
        ("dense-causal", 1),
        # 80-wide tiles start anywhere: two aligned groups cover one.
        ("dense-256", 2),
        ("dense-256-causal", 2),
        # 128 keys from any bit lie in two aligned groups.
        ("offset", 2),
        ("offset-key-starts-causal", 2),
        ("offset-256", 2),
    ),
)
def test_words_come_in_16_byte_loads(records, name, loads_a_row):
    record = records[name]
    assert record.applications > 0
    calls = ROWS * record.applications
    assert record.mask_loads[128] == calls * loads_a_row
    # At most the request's key start comes as a single word.
    assert record.mask_loads.get(32, 0) <= calls * ("offset" in name)
    assert set(record.mask_loads) <= {32, 128}


@pytest.mark.parametrize(
    "name, share",
    params(
        ("dense", 0.11),  # 2527 against 2289
        ("dense-causal", 0.10),  # 3413 against 3164
        ("dense-256", 0.12),  # 2840 against 2575: two loads a row
    ),
)
def test_adds_little_to_the_unmasked_kernel(records, name, share):
    record = records[name]
    unmasked = record.instructions - record.added_instructions
    assert record.added_instructions <= share * unmasked


def test_the_bounds_refuse_the_scalar_form(records):
    # 4217 instructions, one 32-bit load a key: what stock FA4 can run on SM90.
    record = records["scalar"]
    unmasked = record.instructions - record.added_instructions
    assert record.added_instructions > 0.5 * unmasked
    assert record.mask_loads.get(128, 0) == 0
    assert record.mask_loads[32] >= 64 * record.applications


def test_a_callback_that_fa4_would_ignore_does_not_compile():
    variant = Variant(causal=True, callback="word32_scalar", lse=False)
    with pytest.raises(CodegenError, match="does not support causal=True"):
        compile_variants([variant], arch=ARCH)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashAttention's series: it applies, compiles, and is what servers run.

The tree is the FA4 that vLLM vendors, under the names of its own repository.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_sparse_mla.cli import app
from vllm_sparse_mla.codegen import (
    HEAD_DIMS,
    CodegenRecord,
    Variant,
    compile_variants,
)
from vllm_sparse_mla.export_patch import suite
from vllm_sparse_mla.export_patch.fa4 import PACKAGES, fa4_series
from vllm_sparse_mla.export_patch.series import Patch

HOST_RUN = suite.tests_root() / "vllm_flash_attn/sm90_mask_on_host.py"
THEIR_TEST = """\
import pytest

COMPUTE_CAPABILITY = 9


def {name}(mask_case):
    # Why.
    if COMPUTE_CAPABILITY not in (10, 11):
        pytest.skip("SM100/SM110-only")
    assert mask_case
"""
THEIR_TESTS = {
    "tests/cute/test_mask_mod.py": "test_cute_mask_mod_vectorized",
    "tests/cute/test_mask_mod_varlen.py": "test_varlen_mask_mod_vectorized",
}


def git(tree: Path, *arguments: str) -> None:
    identity = {f"GIT_COMMITTER_{name}": "a@b.invalid" for name in ("NAME", "EMAIL")}
    environment = os.environ | identity | {"GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", *arguments], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout


def export(folder: Path, *options: str) -> list[Path]:
    arguments = ["export-patch", "--fa4", "--series", str(folder), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return sorted(folder.glob("*.patch"))


@pytest.fixture(scope="module")
def flash_attention(upstream_root, tmp_path_factory) -> Path:
    """A repository with FA4 and two tests in it."""
    tree = tmp_path_factory.mktemp("flash-attention")
    theirs, vllms = (Path(*package.split(".")) for package in PACKAGES)
    (tree / theirs).mkdir(parents=True)
    for path in (upstream_root / vllms).glob("*.py"):
        text = path.read_text().replace(PACKAGES[1], PACKAGES[0])
        (tree / theirs / path.name).write_text(text)
    for name, function in THEIR_TESTS.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(THEIR_TEST.format(name=function))
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "Base", "--author", "A <a@b.invalid>")
    return tree


@pytest.fixture(scope="module")
def series(flash_attention) -> list[Patch]:
    """The series against that repository."""
    return fa4_series(flash_attention, suite.tests_root())


@pytest.fixture(scope="module")
def exported(flash_attention, tmp_path_factory) -> list[Path]:
    """The series as the command writes it."""
    folder = tmp_path_factory.mktemp("series")
    return export(folder, "--upstream", str(flash_attention))


@pytest.fixture(scope="module")
def patched(flash_attention, exported, tmp_path_factory) -> Path:
    """The repository with the series applied."""
    tree = tmp_path_factory.mktemp("patched")
    git(tree, "clone", "-q", str(flash_attention), ".")
    git(tree, "am", *map(str, exported))
    return tree


def test_each_patch_has_its_own_tests(series, upstream_root):
    first, second = series
    kernels = ["flash_fwd.py", "flash_fwd_sm90.py", "mask.py", "utils.py"]
    assert sorted(change.path for change in first.changes) == [
        "flash_attn/cute/flash_fwd_sm100.py",
        "flash_attn/cute/flash_fwd_sm90.py",
        "tests/cute/test_causal_mask_mod.py",
    ]
    assert sorted(change.path for change in second.changes) == [
        *(f"flash_attn/cute/{name}" for name in kernels),
        "tests/cute/test_mask_mod.py",
        "tests/cute/test_mask_mod_varlen.py",
        "tests/cute/test_vector_mask_mod.py",
    ]
    # vLLM's copy comes without their tests, and gives the same patches else.
    for ours, vllms in zip(
        (first, second), fa4_series(upstream_root, suite.tests_root())
    ):
        changes = [c for c in ours.changes if c.path not in THEIR_TESTS]
        assert changes == list(vllms.changes)


def test_git_am_gives_the_files_that_the_patches_name(patched, series):
    *_, last = series
    for change in last.changes:
        assert (patched / change.path).read_text() == change.after
    for name in THEIR_TESTS:
        text = (patched / name).read_text()
        assert "    # Why.\n    if COMPUTE_CAPABILITY not in (9, 10, 11):\n" in text


def test_a_second_export_is_equal(exported, flash_attention, tmp_path):
    again = export(tmp_path / "again", "--upstream", str(flash_attention))
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in exported]
    assert len(again) == 2


def test_a_tree_without_fa4_is_refused(tmp_path):
    arguments = ["--series", str(tmp_path / "s"), "--upstream", str(tmp_path)]
    result = CliRunner().invoke(app, ["export-patch", "--fa4", *arguments])
    assert result.exit_code == 2
    assert "--upstream must hold flash_attn/cute/" in " ".join(result.output.split())


def on_sm90(program: list[str], tree: Path) -> subprocess.CompletedProcess:
    target = {"CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90"}
    return subprocess.run(
        [sys.executable, *program],
        env=os.environ | target | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )


KNOWN = """
from flash_attn.cute import utils

def mask_mod():
    pass

mask_mod.__vec_size__ = 128
for alignment in (None, 1, 32):
    mask_mod.__column_alignment__ = alignment
    print(utils.hash_callable(mask_mod))
"""


def test_a_column_alignment_is_part_of_what_a_callback_is_known_by(patched):
    done = on_sm90(["-c", KNOWN], patched)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(set(done.stdout.split()[-3:])) == 3


@pytest.mark.extra
def test_masks_of_the_patched_tree_are_exact_on_the_host(patched):
    done = on_sm90([str(HOST_RUN), "--fa4-dir", str(patched)], patched)
    found = [json.loads(x) for x in done.stdout.splitlines() if "exact" in x]
    assert done.returncode == 0, (done.returncode, found, done.stderr[-2000:])
    assert len(found) == 22 and all(case["exact"] for case in found), found


SM90 = [
    Variant(callback="dense"),
    Variant(causal=True, callback="offset", key_starts=True),
    Variant(256, 256, callback="dense"),
    Variant(causal=True),
]
SM100 = [Variant(causal=True, callback="dense"), Variant(callback="offset")]
UNMASKED = [
    Variant(head_dim, head_dim_v, causal)
    for causal in (True, False)
    for head_dim, head_dim_v in HEAD_DIMS
]


@pytest.fixture(scope="module")
def patched_sm90(patched) -> dict[Variant, CodegenRecord]:
    """What the patched tree's kernels compile to for sm_90a, compiled once."""
    variants = list(dict.fromkeys([*SM90, *UNMASKED]))
    return dict(zip(variants, compile_variants(variants, "sm_90a", fa4_dir=patched)))


def assert_same_kernels(
    theirs: Iterable[CodegenRecord], ours: Iterable[CodegenRecord]
) -> None:
    for their, our in zip(theirs, ours, strict=True):
        assert their.opcodes == our.opcodes, our.variant.label
        assert their.registers == our.registers
        assert their.mask_loads == our.mask_loads


@pytest.mark.extra
@pytest.mark.codegen
@pytest.mark.timeout(3000)
def test_the_first_patch_shortens_every_causal_kernel_on_sm90(
    flash_attention, patched_sm90
):
    stock = compile_variants(UNMASKED, "sm_90a", fa4_dir=flash_attention)
    for variant, before in zip(UNMASKED, stock):
        after = patched_sm90[variant]
        if variant.causal:
            # 569 to 485 instructions at 192/128, 530 to 484 at 256/256.
            assert after.loop_instructions < before.loop_instructions - 30
        else:
            assert after.opcodes == before.opcodes


@pytest.mark.extra
@pytest.mark.codegen
@pytest.mark.timeout(3000)
def test_the_patched_tree_compiles_to_what_servers_run_on_sm90(patched_sm90):
    ours = compile_variants(SM90, "sm_90a")
    assert_same_kernels([patched_sm90[variant] for variant in SM90], ours)


@pytest.mark.extra
@pytest.mark.codegen
@pytest.mark.timeout(3000)
def test_the_patched_tree_compiles_to_what_servers_run_on_sm100(patched):
    theirs = compile_variants(SM100, "sm_100a", fa4_dir=patched)
    assert_same_kernels(theirs, compile_variants(SM100, "sm_100a"))

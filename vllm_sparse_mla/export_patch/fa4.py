# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The changes of FlashAttention-4, as patches for its own repository.

Both are what servers run: the same edits, the same definitions of ``cute/mask.py``.
"""

from dataclasses import replace
from pathlib import Path

import libcst as cst
import libcst.matchers as m

from vllm_sparse_mla.edits import (
    DIAGONAL_EDITS,
    VECTOR_EDITS,
    Edit,
    apply_edits,
    saved,
)
from vllm_sparse_mla.export_patch.diff import Change
from vllm_sparse_mla.export_patch.port import port_test
from vllm_sparse_mla.export_patch.series import Patch
from vllm_sparse_mla.export_patch.splice import Definition, Rules, splice
from vllm_sparse_mla.export_patch.tidy import layout
from vllm_sparse_mla.overlay import overlay_root

#: FlashAttention's package, and that of the copy inside vLLM.
PACKAGES = ("flash_attn.cute", "vllm.vllm_flash_attn.cute")
_LINE_LENGTH = 100
_MASK_RULES = Rules(
    wrapped={"AttentionMask.apply_mask": "_apply_mask_elementwise"}, formatted=False
)

# The repository has tests of vectorised callbacks, and skips them on SM90.
_SM100_ONLY = m.If(
    test=m.Comparison(
        m.Name("COMPUTE_CAPABILITY"),
        [m.ComparisonTarget(m.NotIn(m.DoNotCare()), m.DoNotCare())],
    )
)


def _also_on_sm90(condition: cst.If) -> cst.If:
    """The skip without SM90 among the architectures that it leaves out."""
    return cst.parse_statement(
        "if COMPUTE_CAPABILITY not in (9, 10, 11):\n"
        '    pytest.skip("vectorized mask_mod application needs SM90 or SM100")\n'
    ).with_changes(leading_lines=condition.leading_lines)


_TEST_EDITS = {
    "tests/cute/test_mask_mod.py": "test_cute_mask_mod_vectorized",
    "tests/cute/test_mask_mod_varlen.py": "test_varlen_mask_mod_vectorized",
}

_DIAGONAL = """\
The forward kernels walk the key blocks of a row tile in loops: blocks on the
diagonal, then those below it, of which every key comes before every query.
In the second kind of loop the diagonal changes no score, and is applied all
the same wherever the loop applies a mask.

Pass mask_causal=False there. No result changes.

Where SM90 applies its mask to every block, the main loop of a causal kernel
at head dimensions 192/128 and 256/256 falls from 569 to 485 and from 530 to
484 instructions, beside 458 and 439 without causal. Otherwise only kernels
that keep `causal` beside a mask_mod change.

Tested: which blocks the loop visits, by BlockInfo's own arithmetic compiled
for the host, for every pair of lengths up to three tiles; attention against a
float64 reference, dense and varlen.
"""
_VECTOR = """\
A mask_mod with __vec_size__ returns bit-packed keep words for adjacent keys.
SM100 takes it; SM80, SM90 and SM120 refuse it, since a thread of their matrix
product owns scattered columns. On SM90 that is no obstacle: the words of a
row are shifted by the thread's column offset, and its columns are then bits
at compile-time positions.

Call the callback once per row and group of keys. Words are loaded one key
block ahead, into registers that the kernel allocates for a row tile and hands
to the mask, so that their latency hides behind a matrix product; under block
sparsity, whose blocks come in another order, where they are used. Key tiles
that are no multiple of __vec_size__ (80 keys at head dimension 256) are put
together from aligned calls. A callback that is exact from other columns says
so by __column_alignment__, and gets fewer calls.

PackGQA, varlen, block sparsity and causal are supported. A window, swapped
operands and the backward pass raise, instead of misreading the words. So does
an elementwise mask_mod beside causal or a window, which was ignored.

The tests compare bit for bit with the scalar callback, dense and varlen, at
column tiles of 80 and 128 keys, with grouped queries and block sparsity; those
of vectorised callbacks lose their skip on SM90. The kernels were compiled for
SM90 and the masks run on the host; on a GPU the tests did not yet run as a
whole.
"""


def _in_flash_attention(text: str) -> str:
    return text.replace(PACKAGES[1], PACKAGES[0])


def _read(root: Path, module: str) -> str:
    """A module of FA4, under the names of its own repository."""
    name = module.rpartition(".")[2]
    folders = [package.replace(".", "/") for package in PACKAGES]
    for folder in folders:
        path = root / folder / f"{name}.py"
        if path.is_file():
            return _in_flash_attention(path.read_text())
    raise ValueError(
        f"--upstream must hold {' or '.join(f'{f}/{name}.py' for f in folders)}, and "
        f"{root} has neither"
    )


def _edited(root: Path, edits: dict[str, tuple[Edit, ...]]) -> list[Change]:
    changes = []
    for module, chosen in edits.items():
        before = _read(root, module)
        after = layout(apply_edits(before, chosen), _LINE_LENGTH, like=before)
        names = dict.fromkeys(edit.function for edit in chosen)
        definitions = tuple(Definition(name, "edited") for name in names)
        path = _in_flash_attention(module).replace(".", "/") + ".py"
        changes.append(Change(path, before, after, definitions))
    return changes


def _mask(root: Path) -> Change:
    module = f"{PACKAGES[1]}.mask"
    before = _read(root, module)
    overlay = (overlay_root() / f"{module.replace('.', '/')}.py").read_text()
    spliced = splice(_in_flash_attention(overlay), before, _MASK_RULES)
    after = layout(spliced.text, _LINE_LENGTH, like=before)
    return Change("flash_attn/cute/mask.py", before, after, spliced.definitions)


def _tests(root: Path, tests: Path | None, name: str) -> list[Change]:
    if tests is None:
        return []
    text = port_test((tests / "vllm_flash_attn" / name).read_text()).text
    return [Change(f"tests/cute/{name}", None, _in_flash_attention(text))]


def _skips(root: Path) -> list[Change]:
    """The repository's own tests, where there are any, without their skips."""
    changes = []
    for path, function in _TEST_EDITS.items():
        if (root / path).is_file():
            before = (root / path).read_text()
            edit = Edit(function, saved(_SM100_ONLY), _also_on_sm90)
            after = apply_edits(before, [edit])
            definitions = (Definition(function, "edited"),)
            changes.append(Change(path, before, after, definitions))
    return changes


def fa4_series(root: Path, tests: Path | None) -> list[Patch]:
    """Patches for the flash-attention repository, in the order in which they apply.

    Args:
        root: Folder that holds ``flash_attn/cute``, or ``vllm/`` with the copy that
            vLLM vendors. Paths and names in the patches are the repository's.
        tests: Folder of this repository's tests; None to add none.

    Raises:
        ValueError: If FA4 lacks a file or has no place for a change.
    """
    diagonal = _edited(root, DIAGONAL_EDITS)
    after_diagonal = {change.path: change.after for change in diagonal}
    both = {
        module: DIAGONAL_EDITS.get(module, ()) + edits
        for module, edits in VECTOR_EDITS.items()
    }
    vectors = [
        replace(change, before=after_diagonal.get(change.path, change.before))
        for change in [*_edited(root, both), _mask(root)]
    ]
    return [
        Patch(
            "Cute, fwd: no diagonal on key blocks that lie below it",
            _DIAGONAL,
            (*diagonal, *_tests(root, tests, "test_causal_mask_mod.py")),
        ),
        Patch(
            "Cute, Flex, SM90: vectorized mask_mod",
            _VECTOR,
            (*vectors, *_skips(root), *_tests(root, tests, "test_vector_mask_mod.py")),
        ),
    ]


def collect_fa4_changes(root: Path, tests: Path | None) -> list[Change]:
    """All that the series changes, as one patch; arguments and errors are its own."""
    changes: dict[str, Change] = {}
    for patch in fa4_series(root, tests):
        for change in patch.changes:
            first = changes.get(change.path)
            if first is not None:
                own = (d for d in first.definitions if d not in change.definitions)
                change = replace(
                    change,
                    before=first.before,
                    definitions=(*own, *change.definitions),
                )
            changes[change.path] = change
    return list(changes.values())

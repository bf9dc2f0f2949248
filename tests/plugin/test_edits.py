# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Edits of single expressions: where they apply, and how an edited module loads."""

import importlib
import inspect
import os
import subprocess
import sys
import traceback
from pathlib import Path

import libcst as cst
import libcst.matchers as m
import pytest

import vllm
from vllm_sparse_mla import edits, guard, overlay
from vllm_sparse_mla.edits import CHANGED, Edit, apply_edits
from vllm_sparse_mla.guard import EditedFile
from vllm_sparse_mla.testing.stock import load_stock_module

UPSTREAM = """\
class Loop:
    def run(self, x):
        if x:  # twice
            return self.step(x, 2)
        return self.step(
            x, 1
        )

    def step(self, x, y):
        raise ValueError(x * y)
"""
TWO = m.Call(args=[m.ZeroOrMore(), m.Arg(m.SaveMatchedNode(m.Integer("2"), CHANGED))])


def three(_):
    return cst.Integer("3")


def test_one_expression_changes_and_nothing_else():
    text = apply_edits(UPSTREAM, [Edit("Loop.run", TWO, three)])
    assert text == UPSTREAM.replace("(x, 2)", "(x, 3)")


@pytest.mark.parametrize(
    "upstream, function, message",
    [
        (UPSTREAM.replace("2)", "4)"), "Loop.run", "must match once, .* 0 times"),
        (UPSTREAM.replace("1\n", "2\n"), "Loop.run", "must match once, .* 2 times"),
        (UPSTREAM, "Loop.walk", r"expected one Loop\.walk, found 0"),
        (UPSTREAM + UPSTREAM, "Loop.run", r"expected one Loop\.run, found 2"),
    ],
    ids=["no-match", "two-matches", "no-function", "two-functions"],
)
def test_anything_but_one_match_is_refused(upstream, function, message):
    with pytest.raises(ValueError, match=message):
        apply_edits(upstream, [Edit(function, TWO, three)])


def test_an_import_takes_the_place_of_a_blank_line():
    edit = Edit("Loop.run", TWO, three, imports=("import math",))
    text = apply_edits(f"import os\n\n\n{UPSTREAM}", [edit])
    assert text.startswith("import os\nimport math\n\nclass Loop:")
    with pytest.raises(ValueError, match="no blank line for 'import math'"):
        apply_edits(f"import os\n{UPSTREAM}", [edit])


def test_a_change_that_moves_lines_is_refused():
    longer = cst.parse_expression("(3 +\n4)")
    with pytest.raises(ValueError, match="moves lines"):
        apply_edits(UPSTREAM, [Edit("Loop.run", TWO, lambda _: longer)])


def test_every_edit_matches_once_in_the_pinned_file():
    """So that a file in which one does not has another digest: the guard refuses it."""
    assert edits.EDITS.keys() == {file.module for file in guard.EDITED_FILES}
    for file in guard.EDITED_FILES:
        text = (Path(vllm.__file__).parent / file.path_in_package).read_text()
        changed = apply_edits(text, edits.EDITS[file.module]).splitlines()
        assert len(changed) == len(text.splitlines())
        pairs = zip(changed, text.splitlines())
        # An expression around another changes where that begins and where it ends.
        assert 0 < sum(a != b for a, b in pairs) <= 2 * len(edits.EDITS[file.module])


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Returns a function that imports ``toy.loop`` from its text, edited."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(edits.EDITS, "toy.loop", (Edit("Loop.run", TWO, three),))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/__init__.py").touch()

    def load(text: str, keeps_name: bool = False):
        (tmp_path / "toy/loop.py").write_text(text)
        overlay.install(
            [EditedFile("toy.loop", "0" * 64, keeps_name=keeps_name)],
            tmp_path,
            tmp_path / "toy",
            on_load=lambda: None,
        )
        return importlib.import_module("toy.loop")

    yield load
    for name in [n for n in sys.modules if n.split(".")[0] == "toy"]:
        del sys.modules[name]


def test_who_asks_for_the_source_gets_the_edited_one(edited, tmp_path):
    loop = edited(UPSTREAM)
    assert "step(x, 3)" in inspect.getsource(loop.Loop.run)
    assert "step(x, 3)" in inspect.getsource(loop)
    assert inspect.getsourcelines(loop.Loop.step)[1] == 9
    assert (tmp_path / "toy/loop.py").read_text() == UPSTREAM
    assert not list(tmp_path.glob("toy/__pycache__/loop*")), "edited bytecode is stored"


def test_tracebacks_show_upstreams_line_numbers(edited):
    with pytest.raises(ValueError, match="21") as raised:
        edited(UPSTREAM).Loop().run(7)
    frames = traceback.extract_tb(raised.value.__traceback__)[1:]
    assert [(f.lineno, f.line) for f in frames] == [
        (4, "return self.step(x, 3)"),
        (10, "raise ValueError(x * y)"),
    ]


def test_another_text_has_another_name(edited):
    """Caches that are keyed by a file's name see the edit."""
    first = edited(UPSTREAM)
    assert Path(first.__file__).name.startswith("loop.edited-")
    del sys.modules["toy.loop"]
    sys.meta_path.pop(0)
    assert edited(UPSTREAM + "\n").__file__ != first.__file__


def test_a_name_that_is_kept_is_that_of_a_file_with_that_source(edited, tmp_path):
    """torch.compile's cache compares the source of what it traced with the file."""
    loop = edited(UPSTREAM, keeps_name=True)
    assert loop.__file__ == str(tmp_path / "toy/loop.py")
    assert inspect.getsource(loop) == UPSTREAM
    with pytest.raises(ValueError, match="21"):
        loop.Loop().run(7)


def test_plain_python_that_is_already_imported_is_edited_where_it_is(edited, tmp_path):
    (tmp_path / "toy/loop.py").write_text(UPSTREAM)
    loop = importlib.import_module("toy.loop")
    run = loop.Loop.run
    assert edited(UPSTREAM, keeps_name=True) is loop
    with pytest.raises(ValueError, match="21") as raised:
        loop.Loop().run(7)
    assert loop.Loop.run is run
    frame = traceback.extract_tb(raised.value.__traceback__)[1]
    assert (frame.filename, frame.lineno) == (str(tmp_path / "toy/loop.py"), 4)


def test_other_files_that_are_already_imported_are_refused(edited, tmp_path):
    (tmp_path / "toy/loop.py").write_text(UPSTREAM)
    loop = importlib.import_module("toy.loop")
    with pytest.raises(RuntimeError, match=r"toy\.loop is already imported"):
        edited(UPSTREAM)
    with pytest.raises(ValueError, match="14"):
        loop.Loop().run(7)


AFTER_VLLMS_IMPORT = """
import vllm.model_executor.layers.attention.mla_attention as module
from vllm_sparse_mla.plugin import register
register()
print(module.MLAAttention._use_sparse_mha.__code__.co_names)
"""


@pytest.mark.processes
def test_a_server_may_import_the_dispatch_before_its_plugins():
    command = [sys.executable, "-c", AFTER_VLLMS_IMPORT]
    environment = os.environ | {"VLLM_SPARSE_MLA_STRICT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "masked_mha_pays" in done.stdout, done.stderr[-2000:]


def test_a_file_without_a_match_cannot_be_imported(edited):
    with pytest.raises(ImportError, match=r"loop\.py: .* matches 0 times"):
        edited(UPSTREAM.replace("2)", "4)"))


def test_fa4s_cache_on_disk_sees_the_edits():
    name = "vllm.vllm_flash_attn.cute.cache_utils"
    edited, stock = importlib.import_module(name), load_stock_module(name)
    assert edited._compute_source_fingerprint() != stock._compute_source_fingerprint()

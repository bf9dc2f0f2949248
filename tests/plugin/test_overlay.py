# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The finder and the loader, on a toy package."""

import importlib
import sys
from pathlib import Path

import pytest

from vllm_sparse_mla import overlay
from vllm_sparse_mla.guard import OverlaidFile

UPSTREAM = """
import math as helper
LIMIT = 1
KEPT = "kept"
_private = "private"
def width(): return "upstream"
def uses(): return width(), LIMIT, helper
class Base:
    def call(self): return width()
"""
OURS = """
import cmath as helper
from toy.layers import _upstream_leaf as _upstream
LIMIT = 2
def width(): return "ours"
class Derived(_upstream.Base): pass
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Returns a function that lays out a toy package and its overlay.

    It takes the two sources of ``toy.layers.leaf`` and returns what
    ``overlay.install`` takes but for the callback.
    """
    installed, root = tmp_path / "site", tmp_path / "checkout"
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def lay_out(upstream: str = UPSTREAM, ours: str = OURS):
        for base, text in ((installed, upstream), (root, ours)):
            (base / "toy/layers").mkdir(parents=True)
            (base / "toy/layers/leaf.py").write_text(text)
        for package in ("toy", "toy/layers"):
            (installed / package / "__init__.py").touch()
        (root / "toy/layers/added.py").write_text("WHO = 'added'\n")
        files = [OverlaidFile("toy.layers.leaf", "0" * 64)]
        files.append(OverlaidFile("toy.layers.added"))
        return files, root, installed / "toy"

    yield lay_out
    for name in [n for n in sys.modules if n == "toy" or n.startswith("toy.")]:
        del sys.modules[name]


def _install(tree):
    overlay.install(*tree, on_load=lambda: None)


def test_both_modules_see_the_replacements(toy):
    _install(toy())
    leaf = importlib.import_module("toy.layers.leaf")
    upstream = sys.modules["toy.layers._upstream_leaf"]

    assert Path(leaf.__file__).parts[-4:] == ("checkout", "toy", "layers", "leaf.py")
    assert leaf.width() == "ours"
    assert upstream.width is leaf.width and upstream.LIMIT == 2
    assert leaf.Derived().call() == "ours"


def test_names_that_only_upstream_has_fall_through(toy):
    _install(toy())
    leaf = importlib.import_module("toy.layers.leaf")
    assert (leaf.KEPT, leaf._private) == ("kept", "private")
    # What upstream merely imports stays upstream's in upstream's code.
    import math

    assert leaf.uses() == ("ours", 2, math)


def test_replacement_imported_from_elsewhere_counts(toy):
    _install(toy(ours="from toy.layers.added import WHO as width\n"))
    importlib.import_module("toy.layers.leaf")
    assert sys.modules["toy.layers._upstream_leaf"].width == "added"


def test_added_module_is_served(toy):
    _install(toy())
    assert importlib.import_module("toy.layers.added").WHO == "added"


def test_private_name_can_be_imported_first(toy):
    _install(toy())
    upstream = importlib.import_module("toy.layers._upstream_leaf")
    assert upstream.width() == "upstream"
    importlib.import_module("toy.layers.leaf")
    assert upstream.width() == "ours"


def test_failing_overlay_file_leaves_nothing_behind(toy):
    tree = toy(ours="def width(): pass\nraise OSError('boom')\n")
    _install(tree)
    with pytest.raises(OSError, match="boom"):
        importlib.import_module("toy.layers.leaf")
    assert "toy.layers.leaf" not in sys.modules
    assert "toy.layers._upstream_leaf" not in sys.modules

    (tree[1] / "toy/layers/leaf.py").write_text(OURS + "\n# longer\n")
    assert importlib.import_module("toy.layers.leaf").uses()[0] == "ours"


@pytest.mark.parametrize("name", ["toy.layers.leaf", "toy.layers.added"])
def test_module_already_imported(toy, name):
    tree = toy()
    (tree[2] / "layers/added.py").write_text("WHO = 'other'\n")
    importlib.import_module(name)
    finders = list(sys.meta_path)
    with pytest.raises(RuntimeError, match=f"{name} is already imported from .*site"):
        _install(tree)
    assert sys.meta_path == finders


IMPORTERS = {
    "module": ("import toy.layers.leaf as leaf", "importer"),
    "function": ("from toy.layers.leaf import width", "importer"),
    "class-through-another-module": ("from toy.user import User", "importer"),
    "package-alone": ("import toy", "unknown"),
    "inside-a-function": ("def f(): import toy.layers.leaf\nf()", "unknown"),
}


@pytest.mark.parametrize(("source", "named"), IMPORTERS.values(), ids=IMPORTERS)
def test_the_importer_is_named_if_it_shows(toy, monkeypatch, tmp_path, source, named):
    tree = toy()
    (tree[2] / "user.py").write_text(
        "from toy.layers.leaf import Base\nclass User(Base): pass\n"
    )
    (tmp_path / "site/importer.py").write_text(source)
    monkeypatch.delitem(sys.modules, "importer", raising=False)
    importlib.import_module("importer")
    importlib.import_module("toy.layers.leaf")
    try:
        with pytest.raises(RuntimeError, match=rf"\(importer: {named}\)"):
            _install(tree)
    finally:
        del sys.modules["importer"]


@pytest.mark.parametrize("name", ["leaf", "added", "_upstream_leaf"])
def test_a_reload_is_refused(toy, name):
    _install(toy())
    leaf = importlib.import_module("toy.layers.leaf")
    module = importlib.import_module(f"toy.layers.{name}")
    before = dict(vars(module))
    with pytest.raises(ImportError, match=f"{name} .* cannot be reloaded: start a new"):
        importlib.reload(module)
    assert vars(module) == before
    assert leaf.Derived.__mro__[1:] == (leaf.Base, object)


def test_missing_overlay_file(toy):
    tree = toy()
    (tree[1] / "toy/layers/added.py").unlink()
    finders = list(sys.meta_path)
    with pytest.raises(FileNotFoundError, match=r"lacks .*added\.py"):
        _install(tree)
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a\nfrom b import c\n", set()),
        ("def f(): x = 1\nasync def g(): pass\nclass C: y = 2\n", {"f", "g", "C"}),
        ("a = b = 1\n(c, [d, *e]) = f()\n", {"a", "b", "c", "d", "e"}),
        ("a: int = 1\nb: int\n", {"a"}),
        ("x.y = 1\nx[0] = 2\n", set()),
        ("if c:\n  a = 1\nelse:\n  def b(): pass\n", {"a", "b"}),
        ("try:\n  a = 1\nexcept E:\n  b = 2\nfinally:\n  c = 3\n", {"a", "b", "c"}),
        ("with w:\n  for i in r:\n    a = 1\n", {"a"}),
        ("__all__ = []\n_a = 1\n", {"_a"}),
    ],
)
def test_defined_names(source, names):
    assert overlay.defined_names(source) == names

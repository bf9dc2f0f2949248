# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What README, CONTRIBUTING and the pages of docs/ name is there, and is called so."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from vllm_sparse_mla import __version__, envs, guard
from vllm_sparse_mla.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
}
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", PAGES[page])
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_there(page):
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.M)
    commands = [command.name for command in app.registered_commands]
    named = re.findall(r"(?:^|`)make ([a-z-]+)", PAGES[page], re.M)
    assert [name for name in named if name not in targets] == []
    named = re.findall(r"(?:^|`)vllm-sparse-mla ([a-z-]+)", PAGES[page], re.M)
    assert [name for name in named if name not in commands] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"\b(?:tests|benchmarks)/[\w/]*\w\.py\b", PAGES[page])
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_installs_from_an_index(page):
    assert not re.search(r"pip install [^\n]*\bvllm-sparse-mla", PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_versions_are_the_pinned_ones(page):
    text = PAGES[page]
    if page in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = ""  # they speak of other versions too
    assert set(re.findall(r"vllm_sparse_mla-([\d.]+\d)", text)) <= {__version__}
    assert set(re.findall(r"vllm-openai:v([\d.]+\d)", text)) <= {guard.VLLM_VERSION}
    if page == "README.md":
        assert set(re.findall(r"vLLM ([\d.]+\d)", text)) == {guard.VLLM_VERSION}


@pytest.mark.parametrize("page", PAGES)
def test_variables_of_a_page_are_there(page):
    sources = Path(envs.__file__).read_text()
    named = set(re.findall(r"\bVLLM_SPARSE_MLA_\w+", PAGES[page]))
    assert [name for name in sorted(named) if f'"{name}"' not in sources] == []


def test_supported_models_are_those_of_the_layer():
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        MASKED_MHA_MODEL_DIMS,
    )

    (row,) = re.findall(r"^\| models \| (.*) \|$", README, re.M)
    found = re.findall(r"\((\d+) heads, (\d+)/(\d+)( without RoPE)?\)", row)
    assert found == [
        (str(heads), str(nope + rope), str(v), "" if rope else " without RoPE")
        for heads, _, nope, rope, v in MASKED_MHA_MODEL_DIMS
    ]


def test_the_log_line_is_the_plugins():
    line = f"vllm-sparse-mla {__version__} is active on vLLM {guard.VLLM_VERSION}: "
    first = next(f for f in guard.OVERLAID_FILES if f.sha256)
    assert f"{line}{first.path_in_package}, ..." in README


def test_the_guard_says_what_contributing_shows(tmp_path):
    with pytest.raises(RuntimeError) as refusal:
        guard.check_installed("0.34.0", tmp_path)
    (shown,) = re.findall(r"^this is made for vLLM.*$", CONTRIBUTING, re.M)
    assert str(refusal.value).startswith(shown.removesuffix(" ..."))


def test_contributing_has_every_field_of_the_register():
    fields = re.findall(r"^\| ([A-Z][\w ]+) \|", CONTRIBUTING, re.M)
    register = (ROOT / "docs/patches.md").read_text()
    entry = register.split("\n### ")[1]
    assert fields == re.findall(r"^- ([A-Z][\w ]+):", entry, re.M)


def test_the_licence_is_the_metadatas():
    assert "Apache License" in (ROOT / "LICENSE").read_text().splitlines()[0]
    assert metadata("vllm-sparse-mla")["License-Expression"] == "Apache-2.0"

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's series: it ends at the whole patch, and each patch is a state that works."""

import pytest

from vllm_sparse_mla.export_patch.changes import collect_vllm_sources, suite_sources
from vllm_sparse_mla.export_patch.diff import patch_text
from vllm_sparse_mla.export_patch.series import Patch, mail_text
from vllm_sparse_mla.export_patch.vllm_series import Prefixes, read_table

pytestmark = pytest.mark.extra

NAMES = [step.name for step in read_table()]


@pytest.fixture(scope="module")
def series(vllm_sources) -> list[Patch]:
    """The series against the installed vLLM."""
    return Prefixes(read_table(), vllm_sources).patches()


def test_the_series_ends_at_the_whole_patch(series, vllm_changes):
    files = {change.path: change.after for p in series for change in p.changes}
    whole = {change.path: change.after for change in vllm_changes}
    assert files == whole


def test_each_patch_begins_where_those_before_it_end(series, vllm_changes):
    files = {change.path: change.before for change in vllm_changes}
    for patch in series:
        for change in patch.changes:
            assert change.before == files[change.path], (patch.subject, change.path)
            files[change.path] = change.after


def test_a_second_export_is_equal(series, upstream_root, suite):
    sources = collect_vllm_sources(upstream_root) + suite_sources(upstream_root, suite)
    again = Prefixes(read_table(), sources).patches()
    texts = [
        [mail_text(patch, i, len(patches)) for i, patch in enumerate(patches, 1)]
        for patches in (series, again)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("place", [0, 1], ids=NAMES[:2])
def test_the_bug_fixes_are_small(series, place):
    product = [c for c in series[place].changes if c.path.startswith("vllm/")]
    lines = patch_text(product).splitlines()
    assert sum(line[0] in "+-" for line in lines if line[:3] not in ("+++", "---")) < 80


def test_every_file_compiles_after_every_patch(series):
    for patch in series:
        for change in patch.changes:
            compile(change.after, change.path, "exec")


def test_a_definition_in_no_patch_and_an_unknown_one_are_refused(upstream_root):
    sources = collect_vllm_sources(upstream_root)
    steps = [step for step in read_table() if step.name != "hopper"]
    with pytest.raises(ValueError, match="no patch of the series brings"):
        Prefixes(steps, sources)
    # Without the suite the table's tests are not there.
    with pytest.raises(ValueError, match=r"brings .* of tests/.*, which are not there"):
        Prefixes(read_table(), sources)

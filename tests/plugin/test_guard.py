# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the plugin does where the installed vLLM is not the pinned one."""

import hashlib
import logging
import sys

import pytest

import vllm
from vllm_sparse_mla import early_log, envs, guard, overlay
from vllm_sparse_mla.guard import OverlaidFile
from vllm_sparse_mla.plugin import register

CONTENT = b"x = 1\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
REPLACED = OverlaidFile("toy.layers.leaf", SHA256)
ADDED = OverlaidFile("toy.layers.added")


@pytest.fixture
def package_dir(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers/leaf.py").write_bytes(CONTENT)
    return tmp_path


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cu129"])
def test_match(package_dir, version):
    assert guard.find_mismatch([REPLACED, ADDED], version, package_dir) is None


@pytest.mark.parametrize("version", ["0.32.9", "0.33.1", "0.33.0rc1", "dev"])
def test_other_version(package_dir, version):
    found = guard.find_mismatch([REPLACED], version, package_dir)
    assert found == f"vLLM {version} is installed"


def test_other_content(package_dir):
    (package_dir / "layers/leaf.py").write_bytes(CONTENT + b"#")
    found = guard.find_mismatch([REPLACED], "0.33.0", package_dir)
    other = hashlib.sha256(CONTENT + b"#").hexdigest()
    assert "leaf.py" in found and SHA256 in found and other in found


def test_file_is_gone(package_dir):
    (package_dir / "layers/leaf.py").unlink()
    assert "lacks" in guard.find_mismatch([REPLACED], "0.33.0", package_dir)


def test_upstream_has_gained_the_file(package_dir):
    (package_dir / "layers/added.py").touch()
    found = guard.find_mismatch([REPLACED, ADDED], "0.33.0", package_dir)
    assert "already has" in found and "added.py" in found


@pytest.fixture
def unregistered(monkeypatch):
    """A process in which the plugin has not run, as far as the finder goes."""
    others = [f for f in sys.meta_path if not isinstance(f, overlay.OverlayFinder)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.delenv("VLLM_SPARSE_MLA_STRICT", raising=False)
    # As in vLLM's processes once logging is set up; caplog listens at the root.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def _other_version(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    return "vLLM 0.99.0 is installed"


def _other_hash(monkeypatch):
    name = "vllm.model_executor.layers.attention.sparse_mla_mask"
    monkeypatch.setattr(guard, "OVERLAID_FILES", (OverlaidFile(name, "0" * 64),))
    return r"sparse_mla_mask\.py has SHA-256"


@pytest.mark.parametrize("spoil", [_other_version, _other_hash])
def test_mismatch_leaves_vllm_stock(unregistered, monkeypatch, caplog, spoil):
    spoil(monkeypatch)
    register()
    assert overlay.active_finder() is None
    (record,) = [r for r in caplog.records if "sparse_mla" in r.name]
    assert record.levelno == logging.WARNING
    for part in (vllm.__version__, f"vllm=={guard.VLLM_VERSION}", "left stock"):
        assert part in record.getMessage()


@pytest.mark.parametrize("spoil", [_other_version, _other_hash])
def test_mismatch_is_an_error_where_strict(unregistered, monkeypatch, spoil):
    monkeypatch.setenv("VLLM_SPARSE_MLA_STRICT", "1")
    with pytest.raises(RuntimeError, match=spoil(monkeypatch)):
        register()
    assert overlay.active_finder() is None


@pytest.mark.parametrize("name", list(envs.ENVIRONMENT_VARIABLES))
@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("0", False), ("", False)],
)
def test_switch(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    assert envs.ENVIRONMENT_VARIABLES[name]() is expected


def test_switch_with_another_value(unregistered, monkeypatch):
    monkeypatch.setenv("VLLM_SPARSE_MLA_SM90", "yes please")
    with pytest.raises(
        ValueError, match="VLLM_SPARSE_MLA_SM90 must be .* 'yes please'"
    ):
        register()
    assert overlay.active_finder() is None


def test_fa4_is_overlaid_only_on_request(monkeypatch):
    name = "vllm.vllm_flash_attn.cute.mask"
    monkeypatch.delenv("VLLM_SPARSE_MLA_SM90", raising=False)
    assert name not in [file.module for file in guard.enabled_files()]
    monkeypatch.setenv("VLLM_SPARSE_MLA_SM90", "1")
    assert name in [file.module for file in guard.enabled_files()]


def test_vllm_knows_the_variables(monkeypatch):
    from vllm.platforms.interface import Platform

    envs.register_with_vllm()
    for name in list(envs.os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    for name in envs.ENVIRONMENT_VARIABLES:
        monkeypatch.setenv(name, "0")
    Platform.validate_environ(hard_fail=True)


@pytest.mark.parametrize(
    ("level", "configure", "shown"),
    [("INFO", "1", True), ("WARNING", "1", False), ("INFO", "0", False)],
)
def test_early_line(monkeypatch, capsys, level, configure, shown):
    """Before vLLM sets up logging: the line obeys the same variables."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", configure)
    monkeypatch.setattr(type(early_log._logger), "hasHandlers", lambda _: False)
    early_log.log(logging.INFO, "100% active")
    assert ("INFO" in (err := capsys.readouterr().err)) is shown
    assert ("100% active" in err) is shown

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the plugin does where the installed vLLM is not the pinned one."""

import base64
import hashlib
import logging
import os
import re
import sys
from pathlib import Path

import pytest

import vllm
from vllm_sparse_mla import early_log, envs, guard, overlay
from vllm_sparse_mla.export_patch import switch
from vllm_sparse_mla.guard import OverlaidFile
from vllm_sparse_mla.plugin import register

CONTENT = b"x = 1\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OVERLAID = (OverlaidFile("toy.layers.leaf", SHA256), OverlaidFile("toy.layers.added"))
RELIED_ON = {"layers/base.py": SHA256}
KEPT = ("layers/leaf.py", "layers/base.py")


@pytest.fixture
def package_dir(tmp_path):
    """An installed package and its installer's records."""
    package = tmp_path / "toy"
    (package / "layers").mkdir(parents=True)
    for path in KEPT:
        (package / path).write_bytes(CONTENT)
    return package


@pytest.fixture
def record(package_dir):
    """Returns a function that writes down a content as the installed one."""

    def write(content: bytes) -> None:
        info = package_dir.parent / "toy-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: toy\nVersion: 1\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
        lines = (f"toy/{path},sha256={digest.rstrip('=')},1\n" for path in KEPT)
        (info / "RECORD").write_text("".join(lines))

    return write


def check(package_dir: Path, version: str = "0.33.0") -> None:
    guard.check_installed(version, package_dir, OVERLAID, RELIED_ON)


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cu129", "0.33.0+vendor"])
def test_match(package_dir, version):
    check(package_dir, version)


@pytest.mark.parametrize("version", ["0.32.9", "0.33.1", "0.33.0rc1", "dev"])
def test_other_version(package_dir, version):
    message = f"but vLLM {version} is installed.*vllm==0.33.0.*made for vLLM {version}"
    with pytest.raises(RuntimeError, match=message):
        check(package_dir, version)


@pytest.mark.parametrize("path", KEPT)
@pytest.mark.parametrize("recorded", [None, "the same"])
def test_another_build(package_dir, record, path, recorded):
    content = CONTENT + b"#"
    (package_dir / path).write_bytes(content)
    if recorded:
        record(content)
    with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0\+vendor is another build"):
        check(package_dir, "0.33.0+vendor")


@pytest.mark.parametrize("path", KEPT)
def test_a_file_that_was_edited_after_installation(package_dir, record, path):
    record(CONTENT)
    (package_dir / path).write_bytes(CONTENT + b"#")
    other = hashlib.sha256(CONTENT + b"#").hexdigest()
    message = f"was edited .*{path} has SHA-256 {other} in place of {SHA256}.*reinstall"
    with pytest.raises(RuntimeError, match=message):
        check(package_dir)


@pytest.mark.parametrize("path", KEPT)
def test_file_is_gone(package_dir, path):
    (package_dir / path).unlink()
    with pytest.raises(RuntimeError, match=f"vLLM 0.33.0 lacks .*{path}"):
        check(package_dir)


def test_upstream_has_gained_the_file(package_dir):
    (package_dir / "layers/added.py").touch()
    with pytest.raises(RuntimeError, match=r"vLLM 0.33.0 has a .*added\.py too"):
        check(package_dir)


@pytest.fixture
def unregistered(monkeypatch):
    """A process in which the plugin has not run, as far as the finder goes."""
    others = [f for f in sys.meta_path if not isinstance(f, overlay.OverlayFinder)]
    monkeypatch.setattr(sys, "meta_path", others)
    for name in (envs.STRICT, envs.SM90):
        monkeypatch.delenv(name, raising=False)
    # As in vLLM's processes once logging is set up; caplog listens at the root.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def _other_version(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    return "vLLM 0.99.0 is installed"


def _other_content(monkeypatch):
    read = Path.read_bytes
    monkeypatch.setattr(
        Path,
        "read_bytes",
        lambda path: read(path) + b"#" * (path.name == "flash_fwd_sm90.py"),
    )
    return r"was edited .*flash_fwd_sm90\.py has SHA-256"


def _imported_too_early(monkeypatch):
    name = "vllm.model_executor.layers.attention.sparse_mla_mask"
    monkeypatch.setitem(sys.modules, name, vllm)
    # Tests before this one may have imported others.
    return r"sparse_mla_\w+ is already imported from"


def _broken_tree(monkeypatch):
    monkeypatch.setattr(overlay, "overlay_root", lambda: Path("nowhere"))
    return "the overlay tree lacks nowhere"


def _bad_value(monkeypatch):
    monkeypatch.setenv(envs.SM90, "yes please")
    return "VLLM_SPARSE_MLA_SM90 must be .* 'yes please'"


def _unforeseen(monkeypatch):
    monkeypatch.setattr(guard, "enabled_files", lambda: 1 / 0)
    return "division by zero"


OBSTACLES = [
    _other_version,
    _other_content,
    _imported_too_early,
    _broken_tree,
    _bad_value,
    _unforeseen,
]


@pytest.mark.parametrize("spoil", OBSTACLES)
def test_an_obstacle_leaves_vllm_stock(unregistered, monkeypatch, caplog, spoil):
    message = spoil(monkeypatch)
    register()
    assert overlay.active_finder() is None
    (record,) = [r for r in caplog.records if "sparse_mla" in r.name]
    assert record.levelno == logging.WARNING
    assert re.search(f"{message}.*left stock", record.getMessage())


@pytest.mark.parametrize("spoil", OBSTACLES)
def test_an_obstacle_is_an_error_where_strict(unregistered, monkeypatch, spoil):
    monkeypatch.setenv(envs.STRICT, "1")
    with pytest.raises(Exception, match=spoil(monkeypatch)):
        register()
    assert overlay.active_finder() is None


@pytest.mark.parametrize("name", [envs.STRICT, envs.SM90, envs.QUANTIZED_KV])
def test_a_value_that_means_nothing(monkeypatch, name):
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ValueError, match=f"{name} must be 1, true, 0, .* got 'yes'"):
        envs.check()


VALUES = {None: False, "": False, "0": False, "false": False, "False": False}
VALUES |= {"1": True, "true": True, "TRUE": True, " 1 ": True}


@pytest.mark.parametrize(("value", "expected"), VALUES.items())
def test_a_switch_means_the_same_to_plugin_and_patch(monkeypatch, value, expected):
    """The patch puts its switch into vLLM's table of variables."""
    entries = [line for name in switch.VARIABLES for line in switch._entry(name)]
    patched = eval("{\n" + "\n".join(entries) + "\n}", {"os": os})
    for name, read in (
        (envs.STRICT, envs.strict),
        (envs.SM90, envs.sm90),
        (envs.QUANTIZED_KV, envs.quantized_kv),
    ):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        assert read() is expected
        envs.check()
    # One more names a file.
    assert patched.pop(envs.COSTS)() == envs.costs()
    assert len(patched) == 2
    assert {read() for read in patched.values()} == {expected}


@pytest.mark.parametrize(
    "name",
    [
        "vllm.vllm_flash_attn.cute.mask",
        "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl",
    ],
)
def test_what_hopper_alone_gets_is_loaded_only_on_request(monkeypatch, name):
    monkeypatch.delenv(envs.SM90, raising=False)
    assert name not in [file.module for file in guard.enabled_files()]
    monkeypatch.setenv(envs.SM90, "1")
    assert name in [file.module for file in guard.enabled_files()]


def test_vllm_knows_the_variables(monkeypatch):
    from vllm.platforms.interface import Platform

    envs.register_with_vllm()
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    for name in (envs.STRICT, envs.SM90, envs.QUANTIZED_KV, envs.COSTS):
        monkeypatch.setenv(name, "0")
    Platform.validate_environ(hard_fail=True)


@pytest.mark.parametrize(("name", "splits"), [(envs.STRICT, False), (envs.SM90, True)])
def test_torch_compiles_cache_is_split_by_what_changes_the_code(
    monkeypatch, name, splits
):
    envs.register_with_vllm()
    factors = []
    for value in "01":
        monkeypatch.setenv(name, value)
        factors.append(vllm.envs.compile_factors())
    assert (factors[0] != factors[1]) is splits


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

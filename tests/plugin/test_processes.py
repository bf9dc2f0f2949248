# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The plugin in processes of its own, as vLLM starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm
from vllm_sparse_mla import envs, guard

pytestmark = pytest.mark.processes

CHECKOUT = Path(__file__).resolve().parents[2]
REPLACED = "vllm.model_executor.layers.attention.sparse_mla_attention"
# A module of the overlay that imports next to nothing.
ADDED = "vllm.model_executor.layers.attention.sparse_mla_sm90"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that runs a script with the checkout first on sys.path."""

    def run(code: str) -> subprocess.CompletedProcess:
        script = tmp_path_factory.mktemp("script") / "script.py"
        script.write_text(code)
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        return subprocess.run(
            [sys.executable, str(script)],
            env=env | {"PYTHONPATH": str(CHECKOUT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def lines_about_us(process: subprocess.CompletedProcess) -> list[str]:
    output = process.stdout + process.stderr
    return [line for line in output.splitlines() if " active on vLLM " in line]


def results(process: subprocess.CompletedProcess) -> dict[str, str]:
    """What the script printed as lines of the form NAME=VALUE."""
    assert process.returncode == 0, process.stderr
    return dict(re.findall(r"^(\w+)=(.*)$", process.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def fresh(run):
    """A new process in which vLLM loads its plugins, twice over."""
    return run(f"""
import importlib, sys
import vllm, vllm.plugins
vllm.plugins.load_general_plugins()
vllm.plugins.plugins_loaded = False
vllm.plugins.load_general_plugins()
from vllm_sparse_mla.overlay import OverlayFinder
print(f"early={{'{REPLACED}' in sys.modules}}")
print(f"vllm={{vllm.__file__}}")
print(f"finders={{sum(isinstance(f, OverlayFinder) for f in sys.meta_path)}}")
replaced = importlib.import_module("{REPLACED}")
print(f"replaced={{replaced.__file__}}")
upstream = sys.modules["vllm.model_executor.layers.attention."
                       "_upstream_sparse_mla_attention"]
print(f"upstream={{upstream.__file__}}")
print(f"joined={{upstream._build_topk_mask is replaced._build_topk_mask}}")
""")


def test_active_after_vllm_loads_its_plugins(fresh):
    found = results(fresh)
    installed = Path(vllm.__file__).parent
    assert found["early"] == "False"
    assert Path(found["replaced"]).is_relative_to(CHECKOUT / "vllm")
    assert Path(found["upstream"]).is_relative_to(installed)
    assert found["joined"] == "True"


def test_called_twice(fresh):
    assert results(fresh)["finders"] == "1"


def test_one_line_tells(fresh):
    (line,) = lines_about_us(fresh)
    assert "INFO" in line and guard.VLLM_VERSION in line
    for file in guard.OVERLAID_FILES + guard.EDITED_FILES:
        on_request = file.enabled is envs.sm90
        assert (file.path_in_package in line) is not on_request


def test_checkout_on_path_does_not_shadow_vllm(fresh):
    assert results(fresh)["vllm"] == vllm.__file__


@pytest.mark.parametrize(
    "statement",
    [
        "from vllm.model_executor.layers.attention import sparse_mla_attention",
        "import vllm.v1.attention.backends.mla.flashmla_sparse as backend",
    ],
    ids=["the-layer", "a-backend"],
)
def test_a_plugin_that_comes_first_and_imports(run, statement):
    """The server starts all the same, and says who was too early."""
    process = run(f"""
import sys, types
other = sys.modules["other_plugin"] = types.ModuleType("other_plugin")
exec("{statement}", vars(other))
import vllm.plugins
vllm.plugins.load_general_plugins()
""")
    assert process.returncode == 0, process.stderr
    told = rf"{REPLACED} is already imported from .*importer: other_plugin"
    assert re.search(told, process.stderr)
    assert lines_about_us(process) == []


def test_forked_and_spawned_children(run):
    """The engine core is forked from, or spawned by, a process with the overlay."""
    process = run(f"""
import importlib, multiprocessing, os
from vllm.plugins import load_general_plugins

def child(queue):
    from vllm_sparse_mla.overlay import active_finder
    inherited = active_finder() is not None
    load_general_plugins()
    file = importlib.import_module("{ADDED}").__file__
    queue.put((inherited, file, os.getpid()))

if __name__ == "__main__":
    load_general_plugins()
    print(f"parent={{os.getpid()}}")
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        inherited, file, pid = queue.get(timeout=120)
        process.join()
        print(f"{{method}}={{pid}}")
        print(f"{{method}}_inherited={{inherited}}")
        print(f"{{method}}_file={{file}}")
""")
    found = results(process)
    assert (found["fork_inherited"], found["spawn_inherited"]) == ("True", "False")
    for method in ("fork", "spawn"):
        assert Path(found[f"{method}_file"]).is_relative_to(CHECKOUT / "vllm")
    # Each process tells, and tells once.
    told = sorted(re.search(r"pid=(\d+)", ln)[1] for ln in lines_about_us(process))
    assert told == sorted(found[name] for name in ("parent", "fork", "spawn"))

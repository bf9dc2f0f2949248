# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each launch of the table: stock, patched and opt-in answer alike.

Three rows at a time fit one GPU: ``make test-launches``; ``ARGS="-k mtp"`` picks some.
"""

import asyncio
import functools
import json
import os

import pytest
from bench_common import origin
from serving import judge, scenario
from serving.client import metrics, open_session
from serving.launches import LAUNCHES, MODEL, Launch
from serving.offline import OfflineRun
from serving.probe import probe_environment, read_records, write_plugins
from serving.server import VARIANTS, Server

pytestmark = [pytest.mark.gpu, pytest.mark.extra]


# What compilers leave in a cache.
BINARIES = (".cubin", ".ptx", ".so", ".o")


OTHER_PLUGIN = """
def register():
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm_sparse_mla import overlay

    if str(overlay.overlay_root()) in sparse_mla_attention.__file__:
        print("other plugin sees the overlay", flush=True)
"""


def fields_of(launch: Launch, **env: str) -> dict:
    """Fields of the servers of a launch."""
    fields = launch.server_arguments() | {"model": launch.model}
    return fields | {"extra_env": {**launch.env, **env}}


@pytest.fixture
def servers(launch, sm90_gpus, running):
    if launch.never:
        pytest.skip(launch.never)
    if launch.package:
        pytest.importorskip(launch.package)
    if sm90_gpus < launch.gpus:
        pytest.skip(f"needs {launch.gpus} SM90 GPUs of one host, found {sm90_gpus}")
    with running(launch.name, **fields_of(launch)) as started:
        yield started


async def _drafts(server: Server) -> tuple[int, int]:
    async with open_session() as session:
        found = await metrics(session, server.url)
    names = ("draft_tokens", "accepted_tokens")
    return tuple(int(found[f"vllm:spec_decode_num_{name}_total"]) for name in names)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_launch(launch, servers, report_dir):
    # vLLM's warm-up has prefills too.
    warm = {name: len(read_records(s.folder)) for name, s in servers.items()}
    answers = scenario.ask(servers, launch.ask)
    calls = {
        name: read_records(server.folder)[warm[name] :]
        for name, server in servers.items()
    }
    drafts = {}
    complaints = [
        *judge.judge_answers(answers),
        *judge.judge_masked_mha(calls, launch.masked),
        *judge.judge_logs(servers, answers),
    ]
    if "--speculative-config" in launch.args and not complaints:
        drafts = {name: asyncio.run(_drafts(s)) for name, s in servers.items()}
        complaints += judge.judge_acceptance(drafts)
    if report_dir is not None:
        report = {"launch": launch.name} | judge.describe(servers, answers, calls)
        report |= {"drafted, accepted": drafts, "complaints": complaints}
        report |= origin() | {"command": "make test-launches"}
        # One write: other workers append to the same file.
        with (report_dir / "launches.jsonl").open("a") as file:
            file.write(json.dumps(report) + "\n")
    assert complaints == []


def test_one_compile_cache(sm90_gpus, running, tmp_path):
    """Three variants share a cache, twice: no wrong hits, and nothing compiled anew."""
    cache = {
        name: str(tmp_path / name)
        for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    ask = functools.partial(scenario.ask_server, lengths=(300, 2900))
    binaries = []
    for start in ("first", "second"):
        prefix = f"compile-cache-{start}"
        with running(prefix, **fields_of(Launch(prefix), **cache)) as started:
            assert judge.judge_answers(scenario.ask(started, ask)) == []
        binaries.append(
            {
                str(path.relative_to(tmp_path))
                for path in tmp_path.rglob("*")
                if path.suffix in BINARIES and path.stem not in judge.COMPILED_BY_BATCH
            }
        )
    assert binaries[0], "no compiler left anything where it was told to"
    assert sorted(binaries[1] - binaries[0]) == []


def test_a_plugin_after(sm90_gpus, running, tmp_path, monkeypatch):
    """Another plugin imports the layers, once this one has loaded."""
    write_plugins(tmp_path, other_plugin="other_plugin:register")
    (tmp_path / "other_plugin.py").write_text(OTHER_PLUGIN)
    # Behind the probe, which loads the patch set.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    launch = Launch("plugin-after")
    with running(launch.name, **fields_of(launch)) as started:
        answers = scenario.ask(started)
        assert judge.judge_answers(answers) == []
        assert judge.judge_logs(started, answers) == []
        logs = {name: server.log_text() for name, server in started.items()}
    seen = {name: "other plugin sees the overlay" in log for name, log in logs.items()}
    assert seen == {"stock": False, "patched": True, "opt-in": True}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_offline(method, sm90_gpus, model_folder, tmp_path):
    """The engine of `LLM` is in a process that is forked or spawned."""
    started = {}
    for variant in VARIANTS:
        folder = tmp_path / variant
        environment = probe_environment(folder, all_lengths=True)
        environment["VLLM_WORKER_MULTIPROCESSING_METHOD"] = method
        run = OfflineRun(*(model_folder(MODEL), variant, folder), extra_env=environment)
        started[variant] = run.start()
    try:
        answers = {name: run.wait_answers() for name, run in started.items()}
    finally:
        for run in started.values():
            run.stop()
    calls = {name: read_records(run.folder) for name, run in started.items()}
    active = {name: run.active_pids() for name, run in started.items()}
    assert judge.judge_answers(answers) == []
    assert judge.judge_masked_mha(calls, True) == []
    # The caller's process, and the engine's.
    assert {name: len(set(pids)) for name, pids in active.items()} == {
        "stock": 0,
        "patched": 2,
        "opt-in": 2,
    }
    assert all(len(set(pids)) == len(pids) for pids in active.values())

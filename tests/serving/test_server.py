# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The server's command line, its log, and the probe inside it; no GPU."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
from serving import probe
from serving.probe import (
    GPU_MEMORY_PLUGIN,
    gpu_mib_at,
    probe_environment,
    read_gpu_memory,
    read_records,
)
from serving.server import Server, variant_environment

from vllm.utils import jit_monitor
from vllm_sparse_mla import plugin

# vLLM's own parser, which wants to know a device before it has any defaults.
PARSE = """
import json, sys
from vllm.platforms import current_platform
current_platform.device_type = "cpu"
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
config = args.compilation_config
print(json.dumps({
    "mode": int(config.mode),
    "graphs": config.cudagraph_mode.name,
    "kv": args.kv_cache_memory_bytes,
    "jit": args.jit_monitor_verbose,
    "tokenizer": not args.skip_tokenizer_init,
}))
"""

# A process that loads the plugin of stock servers, and forks another.
WATCHED = """
import os, sys, time
import torch
torch.cuda.is_initialized = lambda: True
torch.cuda.memory_stats = lambda: {
    "allocated_bytes.all.current": 3, "reserved_bytes.all.current": 5
}
from vllm.plugins import load_general_plugins
load_general_plugins()
child = os.fork()
time.sleep(2.5)
if child:
    os.waitpid(child, 0)
    print(os.getpid(), child, "vllm_sparse_mla.overlay" in sys.modules, sep="\\n")
"""

# The dispatch of an SM100 GPU, asked in a process that loaded its plugins as a
# server does.
PROBED = """
import os, sys
import vllm.utils.torch_utils
from vllm_sparse_mla.testing.flash_attn_stub import install_parent_module
vllm.utils.torch_utils.PIN_MEMORY = False
install_parent_module()
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
sparse_mla_attention.current_platform.is_device_capability_family = (
    lambda family: family == 100
)
sparse_mla_attention.get_flash_attn_version = lambda **kwargs: 4
for heads in (16, 128):
    dims = (heads, 512, 128, 64, 128, "auto")
    print(sparse_mla_attention._is_masked_mha_available(*dims))
    print(sparse_mla_attention._upstream._is_masked_mha_available(*dims))
for query_len, seq_len in ((2048, 16000), (1, 40000)):
    print(mla_attention._use_masked_mha(
        backend_name="FLASHMLA_SPARSE", tensor_parallel_size=1, qk_head_dim=192,
        v_head_dim=128, query_len=query_len, seq_len=seq_len, has_context=False,
    ))

class Impl:
    num_heads = 16

try:
    sparse_mla_attention.SparseMLACommonImpl._run_masked_mha(
        Impl(), 1, 2, 3, 4, 5, 600, 700, mask=None, causal=True
    )
except Exception:
    pass  # It gets as far as it can without a GPU; the call is recorded before.
"""

LOG = """\
(pid=11) INFO 11-29 10:00:00 [vllm.plugins.sparse_mla] vllm-sparse-mla 0.1.0 is \
active on vLLM 0.33.0: model_executor/layers/attention/sparse_mla_mask.py
(EngineCore pid=12) INFO 11-29 10:00:01 [plugin.py:59] vllm-sparse-mla 0.1.0 is \
active on vLLM 0.33.0: model_executor/layers/attention/sparse_mla_mask.py
(EngineCore pid=12) WARNING 11-29 10:00:02 [jit_monitor.py:141] Triton kernel JIT \
compilation during inference: _topk_kernel (constexprs={}). This causes a spike.
(EngineCore pid=12) WARNING 11-29 10:00:02 [jit_monitor.py:141] CuTeDSL JIT \
compilation during inference: FlashAttentionForwardSm90. This causes a spike.
"""


@pytest.mark.processes
def test_vllm_takes_the_command_line(run_python, tmp_path):
    server = Server(Path("model"), "patched", tmp_path, kv_cache_gib=2)
    arguments = server.command()[4:]
    lines = run_python(PARSE, *arguments, folder=tmp_path, VLLM_PLUGINS="")
    assert json.loads(lines[-1]) == {
        "mode": 0,
        "graphs": "NONE",
        "kv": 2 * 2**30,
        "jit": True,
        "tokenizer": False,
    }


def test_variants():
    assert variant_environment("stock") == {"VLLM_PLUGINS": ""}
    assert variant_environment("patched")["VLLM_SPARSE_MLA_SM90"] == "0"
    assert variant_environment("opt-in")["VLLM_SPARSE_MLA_SM90"] == "1"
    with pytest.raises(ValueError, match="variant must be one of .* got 'fast'"):
        variant_environment("fast")


class _FailingServer(Server):
    def command(self) -> list[str]:
        return [sys.executable, "-c", "raise OSError('no such model')"]


def test_server_that_does_not_start_shows_its_log(tmp_path):
    server = _FailingServer(tmp_path, "stock", tmp_path).start()
    with pytest.raises(RuntimeError, match="(?s)stock server was not ready.*such mod"):
        server.wait_ready()
    server.stop()


def test_log_is_read(tmp_path):
    server = Server(Path("model"), "patched", tmp_path)
    server.log_path.write_text(LOG)
    assert server.active_pids() == [11, 12]
    assert server.jit_kernels() == ["_topk_kernel", "FlashAttentionForwardSm90"]


def test_log_patterns_match_what_the_code_logs():
    assert re.search(
        r"vllm-sparse-mla \S+ is active on", Path(plugin.__file__).read_text()
    )
    source = Path(jit_monitor.__file__).read_text()
    assert '"%s %s during inference: %s%s. "' in source
    assert re.search(r'event="(kernel )?JIT compilation"', source)


@pytest.mark.processes
def test_gpu_memory_is_recorded_in_stock_processes_and_their_forks(
    run_python, tmp_path
):
    environment = probe_environment(tmp_path) | {"VLLM_PLUGINS": GPU_MEMORY_PLUGIN}
    parent, child, patched = run_python(WATCHED, folder=tmp_path, **environment)
    assert patched == "False"
    records = read_gpu_memory(tmp_path)
    assert {record["pid"] for record in records} == {int(parent), int(child)}
    for record in records:
        assert (record["allocated"], record["reserved"]) == (3, 5)
        assert record["time"] == pytest.approx(time.time(), abs=120)


def test_gpu_memory_is_what_was_seen_after_a_moment(tmp_path, monkeypatch):
    seen = [(time.time() - 1, 5), (time.time(), 3), (time.time() + 1, 4)]
    (tmp_path / probe._GPU_MEMORY).write_text(
        "".join(
            json.dumps({"time": at, "allocated": mib * 2**20, "reserved": 7 * 2**20})
            + "\n"
            for at, mib in seen
        )
    )
    assert gpu_mib_at(tmp_path, seen[1][0]) == {"allocated": 3, "reserved": 7}
    monkeypatch.setattr(probe, "GPU_MEMORY_PERIOD_S", 0.01)
    with pytest.raises(RuntimeError, match="does not report its memory"):
        gpu_mib_at(tmp_path, seen[2][0] + 1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kwargs", "answers"),
    [
        ({"ranks": 8}, [True, True, False, False, True, False]),
        ({"all_lengths": True}, [False, False, True, True, True, True]),
    ],
    ids=["rank-of-8", "all-lengths"],
)
def test_probe(run_python, kwargs, answers, tmp_path):
    environment = probe_environment(tmp_path, **kwargs)
    output = run_python(PROBED, folder=tmp_path, **environment)
    assert output[-len(answers) :] == list(map(str, answers))
    (record,) = read_records(tmp_path)
    assert record.pop("pid") > 0
    assert record == {
        "num_heads": 16,
        "max_seqlen_q": 600,
        "max_seqlen_k": 700,
        "causal": True,
    }

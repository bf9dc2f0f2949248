# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each launch of the table as far as vLLM goes without a GPU: it takes the arguments.

vLLM's own parser and configuration, for H200s that are not here, without flashinfer.
Whether such a server starts and answers, ``test_launches`` sees.
"""

import json
import re
from pathlib import Path

import pytest
from serving.launches import LAUNCHES
from serving.server import Server

from vllm_sparse_mla.testing.tiny_model import get_spec, make_config
from vllm_sparse_mla.testing.tiny_tokenizer import write_tokenizer

CONFIGURE = """
import json, os, sys
from vllm_sparse_mla.check.environment import prepare_process
prepare_process((9, 0))
import vllm.utils.flashinfer
vllm.utils.flashinfer.has_flashinfer = lambda: False
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.selector import get_attn_backend

parser = make_arg_parser(FlexibleArgumentParser())

def configure(arguments):
    args = parser.parse_args(arguments)
    args.model = args.model_tag
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    model, parallel = config.model_config, config.parallel_config
    speculative, text_config = config.speculative_config, model.hf_text_config
    # Some backends allocate when they are imported.
    with set_current_vllm_config(config), FakeTensorMode():
        backend = get_attn_backend(
            text_config.kv_lora_rank + text_config.qk_rope_head_dim,
            model.dtype,
            config.cache_config.cache_dtype,
            use_mla=True,
            use_sparse=True,
            num_heads=model.get_num_attention_heads(parallel),
        )
    return {
        "backend": backend.get_name(),
        "graphs": config.compilation_config.cudagraph_mode.name,
        "eager": model.enforce_eager,
        "topk": text_config.index_topk,
        "budget": config.scheduler_config.max_num_batched_tokens,
        "longest piece": config.scheduler_config.long_prefill_token_threshold,
        "gpus": parallel.world_size_across_dp,
        "dbo": parallel.enable_dbo,
        "drafts": speculative.num_speculative_tokens if speculative else 0,
        "tokenizer": not model.skip_tokenizer_init,
        "prefill": getattr(config.attention_config.mla_prefill_backend, "name", None),
    }

answers = {}
for name, (arguments, environment) in json.loads(sys.argv[1]).items():
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        answers[name] = configure(arguments)
    except (Exception, SystemExit) as error:
        answers[name] = {"refused": repr(error)}
    os.environ.clear()
    os.environ.update(before)
print(json.dumps(answers))
"""

# What each row is about; the rest is vLLM's default.
DEFAULTS = {
    "backend": "FLASH_ATTN_MLA_SPARSE",
    "graphs": "FULL_AND_PIECEWISE",
    "eager": False,
    "topk": 512,
    "budget": 1533,
    "longest piece": 0,
    "gpus": 1,
    "dbo": False,
    "drafts": 0,
    "tokenizer": False,
    "prefill": None,
}
TWO = {"gpus": 2}
MANY = {"graphs": "NONE"}
ROWS = {
    "defaults": {},
    "enforce-eager": {"eager": True, "graphs": "NONE"},
    "mtp-1": {"drafts": 1},
    "mtp-3": {"drafts": 3},
    "index-topk-1024": {"topk": 1024},
    "long-prefill-128": MANY | {"longest piece": 128, "budget": 32768},
    "long-prefill-301": MANY | {"longest piece": 301, "budget": 8192},
    "budget-1024": {"budget": 1024},
    "budget-2048": {"budget": 2048},
    "budget-2049": {"budget": 2049},
    "prompt-logprobs": {},
    "text": {"tokenizer": True},
    "glm5": {},
    "glm5-mtp-3": {"drafts": 3},
    "glm5-flash": {},
    "prefill-flash-attn": {"prefill": "FLASH_ATTN"},
    "prefill-flashinfer": {"prefill": "FLASHINFER"},
    "prefill-trtllm-ragged": {"prefill": "TRTLLM_RAGGED"},
    "tp2": TWO,
    "dp2-ep": TWO,
    "dbo": TWO | {"dbo": True},
    "pcp2": TWO,
    "dcp2": TWO | {"backend": "FLASHMLA_SPARSE"},
}
REFUSED = {"batch-invariant": "No valid attention backend"}


@pytest.fixture(scope="module")
def configured(run_python, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("launches")
    rows = {}
    for launch in LAUNCHES:
        model = folder / launch.model
        model.mkdir(exist_ok=True)
        spec = get_spec(launch.model)
        (model / "config.json").write_text(json.dumps(make_config(spec)))
        write_tokenizer(model, spec.vocab_size)
        server = Server(model, "opt-in", folder, **launch.server_arguments())
        rows[launch.name] = (server.command()[4:], dict(launch.env))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    lines = run_python(CONFIGURE, json.dumps(rows), folder=folder, **quiet)
    return json.loads(lines[-1])


def test_every_row_is_here():
    assert {launch.name for launch in LAUNCHES} == {*ROWS, *REFUSED}


def test_every_row_is_documented():
    page = (Path(__file__).parents[2] / "docs/launches.md").read_text()
    (table,) = re.findall(r"<!-- rows:begin -->\n(.*)<!-- rows:end", page, re.S)
    cells = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    found = sum((cell.split(", ") for cell in cells), [])
    others = ["offline", "plugin-after", "compile-cache"]  # tests of their own
    assert found == [*(launch.name for launch in LAUNCHES), *others]


@pytest.mark.processes
@pytest.mark.parametrize("name", ROWS)
def test_vllm_takes_the_launch(name, configured):
    assert configured[name] == DEFAULTS | ROWS[name]


@pytest.mark.processes
@pytest.mark.parametrize("name", REFUSED)
def test_vllm_refuses_the_launch(name, configured):
    assert REFUSED[name] in configured[name]["refused"]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the GPU tests and every benchmark on the GPU that is here; make a page of them.

    python3 benchmarks/gpu_report.py                     # all
    python3 benchmarks/gpu_report.py --only mask tests   # these steps alone

Each step writes ``report-STEP-GPU.csv``. The page, ``report-GPU.md``, begins as a copy
of the B200's where there is none. A step that fails is named at the end, and the others
are run nevertheless; steps that were left out keep the files that they have. The rows
of ``prefill-fit`` also give coefficients of the estimate for this GPU, as JSON.
"""

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

import torch
from bench_common import on_sm90, plain_parser, require_gpu, save_csv
from result_tables import read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TEMPLATE = RESULTS / "report-b200.md"
PYTEST, FIT = "pytest", "prefill-fit"


def steps(sm90: bool) -> dict[str, list[str]]:
    """By step, the program and its arguments; the longest steps come last."""
    # On SM90 the patch set dispatches as stock does, until it is asked for more.
    variants = f"stock,{'opt-in' if sm90 else 'patched'}"
    mask, prefill = "benchmark_sparse_mla_mask", "benchmark_masked_prefill"
    # On SM90 the patch set edits no kernel that stock's callbacks run in.
    stock = {} if sm90 else {"mask-stock": [mask, "--stock"]}
    return {
        "mask": [mask],
        **stock,
        "masked-prefill": [
            *(prefill, "--models", "deepseek", "glm", "--heads", "16", "64", "128"),
            *("--shapes", "q4k", "q8k", "q16k", "q1021s8192", "q4ks16k"),
            *("--repeat", "7"),
        ],
        "prefill-mixes": [prefill, "--preset", "mixes", "--repeat", "7"],
        FIT: [prefill, "--preset", "fit", "--repeat", "5", "--time-limit", "60"],
        "topk-mask-build": ["benchmark_topk_mask_build", "--repeat", "10"],
        "mha-layout": ["benchmark_mha_layout", "--repeat", "10"],
        "first-call": ["benchmark_first_call"],
        "serving-ttft": [
            *("benchmark_serving_ttft", "--model", "dsv32-16h", "--ranks", "8"),
            *("--variants", variants),
        ],
        "prefill-profile": [
            *("benchmark_prefill_profile", "--model", "dsv32-16h", "--ranks", "8"),
            *("--repeat", "3", "--variants", variants),
        ],
        "prefill-profile-128h": [
            *("benchmark_prefill_profile", "--model", "dsv32-128h"),
            *("--repeat", "3", "--variants", variants),
        ],
        "serving-load": [
            *("benchmark_serving_load", "--seconds", "20", "--warm-up", "20"),
            *("--variants", variants),
        ],
        "serving-day": [
            *("benchmark_serving_day", "--rounds", "1"),
            *("--variants", variants),
        ],
        "serving-multi-turn": [
            *("benchmark_serving_multi_turn", "--variants", variants),
            *("--rounds", "5", "--api-servers", "4"),
        ],
        # A GPU has room for some twenty processes: servers and workers not together.
        "tests-serving": [
            *(PYTEST, "--gpu", "-q", "tests/serving"),
            *("-n", "2", "--dist", "loadgroup"),
        ],
        "tests": [
            *(PYTEST, "--gpu", "-q", "--ignore", "tests/serving"),
            *("-n", "auto", "--maxprocesses", "12", "--dist", "loadgroup"),
        ],
    }


def gpu_tag(name: str) -> str:
    """What the files of a GPU end with: ``NVIDIA H200`` gives ``h200``."""
    words = name.removeprefix("NVIDIA ").lower().split()
    return words[0].replace("-", "_")


def junit_rows(junit: Path) -> list[dict]:
    """Outcomes of the tests by file, from pytest's JUnit report."""
    found: dict[str, Counter] = defaultdict(Counter)
    for case in ElementTree.parse(junit).iter("testcase"):
        counts = found[case.get("classname", "").replace(".", "/") + ".py"]
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        skipped = not failed and "skipped" in kinds
        counts["failed"] += failed
        counts["skipped"] += skipped
        counts["passed"] += not (failed or skipped)
        counts["seconds"] += float(case.get("time", 0))
    names = ("passed", "failed", "skipped", "seconds")
    return [
        {"file": file} | {name: counts[name] for name in names}
        for file, counts in sorted(found.items())
    ]


def run_step(name: str, command: list[str], csv: Path) -> bool:
    """Run one step; whether it succeeded."""
    if command[0] == PYTEST:
        junit = csv.with_suffix(".xml")
        command = [sys.executable, "-m", *command, f"--junitxml={junit}"]
        done = subprocess.run(command, cwd=ROOT)
        if junit.exists():
            save_csv(csv, junit_rows(junit))
            junit.unlink()
    else:
        script = ROOT / "benchmarks" / f"{command[0]}.py"
        command = [sys.executable, str(script), *command[1:], "--csv", str(csv)]
        done = subprocess.run(command, cwd=ROOT)
        if name == FIT and csv.exists():
            script = ROOT / "benchmarks" / "fit_estimate.py"
            command = [sys.executable, str(script), str(csv)]
            subprocess.run([*command, "--json", str(csv.with_suffix(".json"))])
    return done.returncode == 0


def begin_page(folder: Path, tag: str) -> Path:
    """The page of this GPU: the one that is there, or a copy of the B200's."""
    page = folder / f"report-{tag}.md"
    if not page.exists():
        text = TEMPLATE.read_text()
        page.write_text(text.replace(": B200\n", f": {tag.upper()}\n", 1))
    return page


def main() -> None:
    """Command line."""
    parser = plain_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=[*steps(sm90=False)], metavar="STEP"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    require_gpu()
    args.out.mkdir(parents=True, exist_ok=True)
    tag = gpu_tag(torch.cuda.get_device_name())
    page = begin_page(args.out, tag)
    ran_file = args.out / f"report-steps-{tag}.csv"
    earlier = read_rows([ran_file]) if ran_file.exists() else []
    ran = {row["step"]: row for row in earlier}
    failed = []
    for name, command in steps(on_sm90()).items():
        if args.only and name not in args.only:
            continue
        start = time.monotonic()
        print(f"== {name}: {' '.join(command)}", flush=True)
        succeeded = run_step(name, command, args.out / f"report-{name}-{tag}.csv")
        if not succeeded:
            failed.append(name)
        seconds = round(time.monotonic() - start)
        outcome = "succeeded" if succeeded else "failed"
        ran[name] = {"step": name, "outcome": outcome, "seconds": seconds}
        save_csv(ran_file, list(ran.values()))
        print(f"== {name}: {outcome} in {seconds} s", flush=True)
    # Not before: a machine that only measures needs no cogapp until here.
    from render_results import render

    render([page])
    print(page)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

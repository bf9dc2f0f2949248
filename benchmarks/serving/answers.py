# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The check before times: whether servers of one model answer alike."""

from collections.abc import Iterable

from bench_common import with_progress

from serving.client import complete, make_prompt
from serving.compare import between, difference
from serving.scenario import (
    STOCK_NOISE,
    control_difference,
    control_prompt,
    noise_budget,
)

CHECK_RUNS = 2


async def compare_answers(
    session, servers, lengths: Iterable[int], unquantized=None
) -> dict[int, dict[str, dict[str, float]]]:
    """Compare the servers' answers to a prompt of each length.

    The first server is what the others are compared with; `unquantized` is one like it,
    with a KV cache that is not quantized.

    Returns:
        By length and variant, columns for the rows of a table.

    Raises:
        RuntimeError: Some do not agree; the message names them.
    """
    complaints, columns = [], {}
    for length in with_progress(lengths, "comparing answers"):
        found, columns[length] = await check_answers(
            session, servers, length, unquantized
        )
        complaints += found
    if complaints:
        raise RuntimeError("nothing was timed: " + "; ".join(complaints))
    return columns


async def check_answers(
    session, servers, length: int, unquantized=None
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Compare the servers' answers to a prompt.

    Returns:
        Complaints about those that do not agree, and by variant columns for its rows.
    """

    def score(server, prompt: list[int], salt: str):
        return complete(session, server.url, prompt, 1, salt=salt, score_prompt=True)

    prompt = make_prompt(length, seed=length)
    answers = {
        variant: [await score(server, prompt, f"check {i}") for i in range(CHECK_RUNS)]
        for variant, server in servers.items()
    }
    baseline = next(iter(servers))
    expected = answers[baseline]
    # Another order of rounding also moves keys over the edge of the top-k, so a
    # single token may differ by more than runs of one variant do; the mean may not.
    allowed = max(noise_budget([expected]).mean, STOCK_NOISE)
    if unquantized is not None:
        unrounded = await score(unquantized, prompt, "unquantized")
        rounding = difference(expected[0], unrounded).mean
        print(f"{length} tokens, rounding in the cache: {rounding:.5f} on average")
        allowed = max(allowed, 2 * rounding)
    complaints = []
    control = await score(servers[baseline], control_prompt(prompt), "control")
    seen = control_difference(expected[0], control)
    print(
        f"{length} tokens, a quarter of the keys replaced: {seen.mean:.5f} on average"
    )
    if not seen.mean > 2 * allowed:
        complaints.append(
            f"{length} tokens: other keys change the answer by {seen.mean:.5f} on "
            f"average, too little to tell from the {allowed:.5f} allowed"
        )
    columns = {}
    for variant, runs in answers.items():
        found = between(expected, runs)
        columns[variant] = {
            "log-prob difference": f"{found.mean:.4f}",
            "log-prob difference with other keys": f"{seen.mean:.4f}",
        }
        print(
            f"{length} tokens, {variant} against {baseline}: log-probabilities "
            f"differ by {found.mean:.5f} on average, {found.largest:.4f} at most"
        )
        if not found.mean <= allowed:
            complaints.append(
                f"{length} tokens: {variant} answers otherwise than {baseline}, by "
                f"{found.mean:.5f} on average where {allowed:.5f} is allowed"
            )
    return complaints, columns

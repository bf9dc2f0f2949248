# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare answers of servers, with a budget taken from stock vLLM's own spread."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.client import Completion


@dataclass(frozen=True)
class Difference:
    """Distance of two answers to one prompt."""

    largest: float = 0.0  # largest absolute difference of a log-probability
    mean: float = 0.0  # mean absolute difference
    # Index of the first generated token that differs, or None.
    diverged_at: int | None = None
    # How far the first answer's best token was ahead of its second there.
    gap: float = 0.0

    @property
    def identical(self) -> bool:
        """Whether every token and every log-probability agree exactly."""
        return self.largest == 0.0 and self.diverged_at is None

    def within(self, budget: "Difference") -> bool:
        """Whether this difference fits ``budget``.

        Greedy decoding may take another token only where the budget could have
        turned the order of the two best tokens around.
        """
        return (
            self.largest <= budget.largest
            and self.mean <= budget.mean
            and (self.diverged_at is None or self.gap <= 2 * budget.largest)
        )


def difference(first: Completion, second: Completion) -> Difference:
    """Difference of two answers, up to where their generated tokens part.

    Raises:
        ValueError: An answer is an error, or the prompts' lengths differ.
    """
    for name, answer in (("first", first), ("second", second)):
        if not answer.ok:
            raise ValueError(f"{name} must be a success, got {answer.error!r}.")
    if len(first.prompt_logprobs) != len(second.prompt_logprobs):
        raise ValueError(
            "prompt_logprobs must be of one length, got "
            f"{len(first.prompt_logprobs)} and {len(second.prompt_logprobs)}."
        )
    pairs = list(zip(first.prompt_logprobs, second.prompt_logprobs, strict=True))
    diverged_at, gap = None, 0.0
    for index, tokens in enumerate(zip(first.token_ids, second.token_ids, strict=True)):
        if tokens[0] != tokens[1]:
            diverged_at, gap = index, first.gaps[index]
            break
        pairs.append((first.logprobs[index], second.logprobs[index]))
    if not pairs:
        return Difference(0.0, 0.0, diverged_at, gap)
    distances = [abs(a - b) for a, b in pairs]
    if not all(map(math.isfinite, distances)):
        return Difference(math.inf, math.inf, diverged_at, gap)
    return Difference(max(distances), sum(distances) / len(distances), diverged_at, gap)


def spread(answers: Sequence[Completion]) -> Difference:
    """Largest difference between any two of ``answers`` to one prompt."""
    return worst(difference(a, b) for a, b in itertools.combinations(answers, 2))


def between(first: Sequence[Completion], second: Sequence[Completion]) -> Difference:
    """Largest difference between an answer of ``first`` and one of ``second``."""
    return worst(difference(a, b) for a, b in itertools.product(first, second))


def worst(differences: Iterable[Difference]) -> Difference:
    """Component-wise maximum; of the divergences, the one with the widest gap."""
    differences = list(differences)
    diverged = [d for d in differences if d.diverged_at is not None]
    gap = max((d.gap for d in diverged), default=0.0)
    return Difference(
        max((d.largest for d in differences), default=0.0),
        max((d.mean for d in differences), default=0.0),
        next((d.diverged_at for d in diverged if d.gap == gap), None),
        gap,
    )

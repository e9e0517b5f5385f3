"""SimulatedDrafter: drafts of invented tokens, each right with a given probability."""

from __future__ import annotations

import random
from collections.abc import Sequence

from omniserve.sched.features.drafter import Drafter
from omniserve.simulate.machine import TOKEN

_WRONG = 1


class SimulatedDrafter(Drafter):
    """Guesses the token that comes with a probability of ``chance``, at each position by itself.

    A position's guess is always the same, so that what is drafted twice is right twice.

    Args:
        num_prompt_tokens: The output begins behind them.
        seed: Seed of the guesses.
    """

    def __init__(self, chance: float, num_prompt_tokens: int, seed: str) -> None:
        self._chance = chance
        self._begin = num_prompt_tokens
        self._rng = random.Random(seed)
        self._guesses: list[int] = []

    def draft(self, token_ids: Sequence[int], end: int, most: int) -> list[int]:
        first = end - self._begin
        while len(self._guesses) < first + most:
            self._guesses.append(TOKEN if self._rng.random() < self._chance else _WRONG)
        return self._guesses[first : first + most]


def num_right(draft_ids: Sequence[int]) -> int:
    """Return how many drafts are right: all before the first wrong one."""
    return next((i for i, token_id in enumerate(draft_ids) if token_id != TOKEN), len(draft_ids))

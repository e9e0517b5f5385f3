"""Speculation: the drafts of one request, as many as are likely to be right. They come from its drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from omniserve.core.plan import MAX_DRAFTS
from omniserve.sched.features.drafter import Drafter
from omniserve.sched.state import RequestState

_LEAST_CHANCE = 0.3
"""Least chance of a guess with which drafts are computed: rows may cost more than predicted."""
_SILENT_TOKENS, _ASKED_EVERY = 16, 4
"""Tokens without a guess after which a drafter is asked more rarely: at each ``_ASKED_EVERY``th token."""
_DECLINED_TOKENS = 16
"""Tokens for which no drafts are wanted after a step without time or memory for them: the next will hardly have it."""
_MEMORY = 0.8
"""Weight, at each guess, of what was learned from those before."""


class Speculation:
    """Asks the drafter at every token, and learns how often its guesses are right, whether they are computed or not.

    So a request that its drafter knows nothing of costs a few microseconds a token, and no row of a step.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._num_right, self._num_told = 1.0, 2.0
        self.num_likely = _num_likely(self.chance)
        """Largest n for which the chance that the first n drafts are all right is still worth a row."""
        self._guess: tuple[int, int] | None = None
        """(position, token id) of the last guess, until it is known whether it was right."""
        self._declined_until = 0
        self._known_at = -1
        """Tokens of the text when the drafter knew something last; -1: it was never asked."""

    @property
    def chance(self) -> float:
        """The probability that a draft is right if those before it are, by the last ones."""
        return self._num_right / self._num_told

    def expected(self, count: int) -> float:
        """Return how many of ``count`` drafts are right on average."""
        chance = self.chance
        return chance * (1 - chance**count) / (1 - chance) if chance < 1 else float(count)

    def draft(self, token_ids: Sequence[int], end: int, most: int) -> list[int]:
        """Return drafts of what follows ``token_ids[:end]``, at most ``most``; none while too few of them are right."""
        drafts = self._ask(token_ids, end, max(1, most))
        return drafts[: max(0, most)] if self.chance >= _LEAST_CHANCE else []

    def knows_next(self, token_ids: Sequence[int], end: int) -> bool:
        """Return whether there would be drafts behind the token that follows ``token_ids[:end]``, as it is guessed.

        False for some tokens after ``decline``.
        """
        knows = len(self._ask(token_ids, end, 2)) == 2 and self.chance >= _LEAST_CHANCE
        return knows and end >= self._declined_until

    def decline(self, end: int) -> None:
        """Take note that a step had no use for the drafts of what follows the first ``end`` tokens."""
        self._declined_until = end + _DECLINED_TOKENS

    def learn(self, num_drafts: int, num_right: int) -> None:
        """Take note of what has become of a step's drafts."""
        self._guess = None
        self._note(num_right, is_wrong=num_right < num_drafts)

    def _ask(self, token_ids: Sequence[int], end: int, most: int) -> list[int]:
        if self._guess is not None and self._guess[0] < end:
            position, token_id = self._guess
            is_right = token_ids[position] == token_id
            self._note(int(is_right), is_wrong=not is_right)
        if self._known_at < 0:
            self._known_at = end
        if end - self._known_at > _SILENT_TOKENS and end % _ASKED_EVERY:
            return []
        drafts = self._drafter.draft(token_ids, end, most)
        if drafts:
            self._known_at = end
        self._guess = (end, drafts[0]) if drafts else None
        return drafts

    def _note(self, num_right: int, *, is_wrong: bool) -> None:
        self._num_right = _MEMORY * self._num_right + num_right
        self._num_told = _MEMORY * self._num_told + num_right + is_wrong
        self.num_likely = _num_likely(self.chance)


def _num_likely(chance: float) -> int:
    if chance >= 1:
        return MAX_DRAFTS
    return min(MAX_DRAFTS, int(math.log(_LEAST_CHANCE) / math.log(chance))) if chance > 0 else 0


def speculation_of(state: RequestState) -> Speculation | None:
    """Return what makes a request's drafts; None: it gets none (any more)."""
    found = state.facts.get(Speculation)
    assert found is None or isinstance(found, Speculation)
    return found

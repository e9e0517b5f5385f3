"""Overtaking: how much LS work of other tenants, beside what is ahead now, will be computed before a new request.

A tenant that is ahead of others in virtual time is overtaken by what they send while it waits. How much that is follows
from what they sent lately, and ends where their virtual time has come to that of the new request: to its tenant's when
the requests before it have had their prompts and their outputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from omniserve.core.request import INPUT_COST, OUTPUT_COST
from omniserve.sched.fairness import Account
from omniserve.sched.state import RequestState

_LATELY_S = 10.0
"""Time constant of the rates."""
_MOST_KNOWN = 64
"""Tenants above which those that sent next to nothing lately are forgotten."""
_MOST_BUSY = 0.9
"""Share of the time that the work of others takes at most, in a prediction."""


class Overtaking:
    """Measures the rates at which tenants send prompts that are admitted, in tokens a second."""

    def __init__(self) -> None:
        self._rates: dict[Account, tuple[float, float]] = {}
        """The rate of each tenant of a class, and when that was."""

    def note(self, state: RequestState, now_s: float) -> None:
        """Take note of an LS request that is let in."""
        rate = self._rate(state.account, now_s) + state.num_prompt_tokens / _LATELY_S
        self._rates[state.account] = rate, now_s
        if len(self._rates) > _MOST_KNOWN:
            self._rates = {each: rate for each, rate in self._rates.items() if self._rate(each, now_s) >= 1.0}

    def num_tokens(
        self,
        new: RequestState,
        ahead: Sequence[RequestState],
        others: Sequence[RequestState],
        seconds: float,
        now_s: float,
    ) -> int:
        """Return how many prompt tokens of other tenants will come before a new request beside those ahead of it.

        Args:
            ahead: The requests of ``others`` that are before it now.
            others: The other LS requests with prefill left.
            seconds: Its predicted TTFT behind those ahead.
        """
        own = new.account
        rivals = [each for each in self._rates if each.of_class is own.of_class and each.tenant != own.tenant]
        if not rivals:
            return 0
        tokens_ahead, tokens = _tokens_of(ahead), _tokens_of(others)
        num_own = tokens[own]
        tag = own.virtual_time + INPUT_COST * num_own / own.weight / _prompt_share(own)
        most: dict[Account, float] = {}
        for rival in rivals:
            lead = (tag - rival.virtual_time) * rival.weight * _prompt_share(rival) / INPUT_COST
            most[rival] = max(0.0, lead - tokens_ahead[rival])
        rates = {rival: self._rate(rival, now_s) for rival in rivals if most[rival]}
        num_ahead = tokens_ahead.total() + new.num_tokens - new.num_ready_tokens
        busy = min(_MOST_BUSY, sum(rates.values()) * seconds / max(1, num_ahead))
        waits_s = seconds / (1 - busy)
        coming = {rival: tokens[rival] - tokens_ahead[rival] + rate * waits_s for rival, rate in rates.items()}
        return math.ceil(sum(min(most[rival], coming[rival]) for rival in rates))

    def _rate(self, account: Account, now_s: float) -> float:
        rate, at_s = self._rates.get(account, (0.0, now_s))
        return rate * math.exp(min(0.0, at_s - now_s) / _LATELY_S)


def _tokens_of(states: Sequence[RequestState]) -> Counter[Account]:
    """Return the tokens that are left to compute, by account."""
    tokens: Counter[Account] = Counter()
    for state in states:
        tokens[state.account] += state.num_tokens - state.num_ready_tokens
    return tokens


def _prompt_share(account: Account) -> float:
    """Return which share of a tenant's cost is that of its prompts."""
    prompts = INPUT_COST * account.prompt_tokens
    return max(prompts, 1.0) / max(prompts + OUTPUT_COST * account.output_tokens, 1.0)

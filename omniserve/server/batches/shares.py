"""LineShares: the callers whose batches run share the room for lines by weight, in virtual time.

A caller's virtual time is the cost of its lines over its weight, with the costs of ``core/request.py``. A line counts
as it begins with the mean cost of its caller's lines, and as it ends with its own. A caller that had no line to run
begins at the least virtual time of those that had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from omniserve.core.request import INPUT_COST, OUTPUT_COST
from omniserve.server.batches.lines import LineKey, LineResult, PendingLine

Caller = str | None
"""The name of an API key; None where no keys are asked for."""

_NEWEST = 0.1
"""Weight of the newest line in the mean cost of its caller's lines."""


@dataclass(slots=True)
class _Share:
    """What a caller was given."""

    virtual_time: float = 0.0
    mean_cost: float | None = None
    """Mean cost of its lines that ended lately; None: none has."""


class LineShares:
    """Says whose line is next.

    ``begin`` and ``next`` are for the thread that looks for lines, ``end`` for any.

    Args:
        weights: The weight of each caller; 1 for one that is not among them.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._shares: dict[Caller, _Share] = {}
        self._present: frozenset[Caller] = frozenset()
        """Callers with lines to run at the last look."""
        self._charged: dict[LineKey, float] = {}
        """What was counted for lines that run."""
        self._ended: list[tuple[PendingLine, LineResult | None]] = []

    def begin(self, callers: Collection[Caller]) -> None:
        """Begin a look for lines; these are the callers that have some."""
        while self._ended:
            self._settle(*self._ended.pop())
        stayed = [self._shares[caller].virtual_time for caller in self._present if caller in callers]
        level = min(stayed or [share.virtual_time for share in self._shares.values()], default=0.0)
        for caller in callers:
            share = self._shares.setdefault(caller, _Share())
            if caller not in self._present:
                share.virtual_time = max(share.virtual_time, level)
        self._present = frozenset(callers)

    def next(self, callers: Collection[Caller]) -> Caller:
        """Return which of the callers has the next line."""
        return min(callers, key=lambda caller: (self._shares[caller].virtual_time, caller or ""))

    def take(self, line: PendingLine) -> None:
        """Count a line that is to run."""
        cost = self._shares[line.caller].mean_cost
        if cost is None:
            known = [share.mean_cost for share in self._shares.values() if share.mean_cost is not None]
            cost = sum(known) / len(known) if known else 1.0
        self._add(line.caller, cost)
        self._charged[line.key] = cost

    def end(self, line: PendingLine, result: LineResult | None) -> None:
        """Take note of a line that does not run any more; None: it has no result, and runs again."""
        self._ended.append((line, result))

    def _settle(self, line: PendingLine, result: LineResult | None) -> None:
        charged, cost = self._charged.pop(line.key, 0.0), 0.0
        if result is not None:
            cost = INPUT_COST * (result.num_input_tokens - result.num_cached_tokens)
            cost += OUTPUT_COST * result.num_output_tokens
            share = self._shares[line.caller]
            mean = cost if share.mean_cost is None else share.mean_cost
            share.mean_cost = mean + _NEWEST * (cost - mean)
        self._add(line.caller, cost - charged)

    def _add(self, caller: Caller, cost: float) -> None:
        self._shares[caller].virtual_time += cost / self._weights.get(caller or "", 1.0)

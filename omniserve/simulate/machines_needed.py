"""How many machines of which kind a load needs to keep its objectives and deadlines, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omniserve.core.request import ServiceClass
from omniserve.simulate.results import Result

MOST_MACHINES = 64
"""More are not tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A kind of machine at a price."""

    kind: str
    per_hour: float
    """Price of one for an hour, in any currency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The machines of one kind that a load needs."""

    offer: Offer
    machines: int
    """The fewest that keep everything."""
    for_latency_sensitive: int
    """The fewest without the best-effort work."""
    result: Result
    """The simulation with ``machines``."""

    @property
    def per_hour(self) -> float:
        """Price of all of them for an hour."""
        return self.machines * self.offer.per_hour

    def per_million(self, kind: ServiceClass) -> float:
        """Return the price of a million tokens, of prompts and outputs, of a class.

        Latency-sensitive ones bear the machines that they need alone, best-effort ones what they need besides: nothing,
        if they fit into the gaps. NaN without tokens.
        """
        machines = self.for_latency_sensitive
        if kind is ServiceClass.BE:
            machines = self.machines - machines
        return _per_million(machines * self.offer.per_hour, _tokens_per_s(self.result, [kind]))

    @property
    def per_million_of_all(self) -> float:
        """Price of a million tokens of any class."""
        return _per_million(self.per_hour, _tokens_per_s(self.result, [*ServiceClass]))


def _tokens_per_s(result: Result, kinds: Sequence[ServiceClass]) -> float:
    each = (result.classes[kind] for kind in kinds)
    return sum(one.output_tokens_per_s + one.prompt_tokens_per_s for one in each)


def _per_million(per_hour: float, tokens_per_s: float) -> float:
    return per_hour * 1e6 / (3600 * tokens_per_s) if tokens_per_s else math.nan


def met_deadlines(result: Result) -> float:
    """Return the share of requests with a deadline that kept it, of those whose deadline was before the end; NaN: none.

    A request that was refused has not kept it.
    """
    judged = [
        each
        for each in result.requests
        if each.deadline_s is not None
        and (each.finished_s is not None or each.arrival_s + each.deadline_s <= result.end_s)
    ]
    return sum(each.met_deadline for each in judged) / len(judged) if judged else math.nan


def keeps(result: Result, target: float) -> bool:
    """Return whether a share ``target`` of the LS requests met their objectives, and as many deadlines were kept.

    A class without requests, or without deadlines to judge, has nothing to keep.
    """
    shares = (result.classes[ServiceClass.LS].attainment, met_deadlines(result))
    return all(math.isnan(share) or share >= target for share in shares)


def fewest(keep: Callable[[int], bool], *, least: int = 1, most: int = MOST_MACHINES) -> int | None:
    """Return the smallest number in [least, most] that keeps everything; None if none does.

    Args:
        keep: Whether a number does; it is taken to fail below a number that fails.
        least, most: The range, with ``1 <= least <= most``.
    """
    low, high = least - 1, least
    while not keep(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if keep(middle):
            high = middle
        else:
            low = middle
    return high


def find_plan(offer: Offer, run: Callable[[int, bool], Result], target: float, *, has_best_effort: bool) -> Plan | None:
    """Search the number of machines of a kind; None if 64 of them are too few.

    Args:
        run: Simulates a number of machines, with the best-effort work or without.
        target: See ``keeps``.
        has_best_effort: There is such work.
    """
    results: dict[int, Result] = {}

    def keep_all(number: int) -> bool:
        results[number] = run(number, True)
        return keeps(results[number], target)

    if not has_best_effort:
        machines = fewest(keep_all)
        alone = machines
    else:
        alone = fewest(lambda number: keeps(run(number, False), target))
        machines = None if alone is None else fewest(keep_all, least=alone)
    if machines is None or alone is None:
        return None
    return Plan(offer=offer, machines=machines, for_latency_sensitive=alone, result=results[machines])


def plan_table(plans: Sequence[tuple[Offer, Plan | None]]) -> str:
    """Return a plain-text table of the kinds, the cheapest first."""
    lines: list[tuple[str, ...]] = []
    lines.append(
        ("machines", "an hour", "LS kept", "deadlines", "LS/M tokens", "BE/M tokens", "all/M tokens", "LS alone")
    )
    for offer, plan in sorted(plans, key=lambda pair: math.inf if pair[1] is None else pair[1].per_hour):
        if plan is None:
            lines.append((f"{offer.kind}: {MOST_MACHINES} are too few", *[""] * 7))
            continue
        lines.append(
            (
                f"{plan.machines} x {offer.kind}",
                f"{plan.per_hour:.2f}",
                _percent(plan.result.classes[ServiceClass.LS].attainment),
                _percent(met_deadlines(plan.result)),
                _price(plan.per_million(ServiceClass.LS)),
                _price(plan.per_million(ServiceClass.BE)),
                _price(plan.per_million_of_all),
                str(plan.for_latency_sensitive),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _price(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"

"""The routing policies: each orders the engines that may take a call, the best first.

The call goes to the first; those behind it are tried in turn if an engine refuses it or dies before the first token.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Protocol

from omniserve.core.request import ServiceClass
from omniserve.routing.books import Call, EngineBooks


class Router(Protocol):
    """A routing policy."""

    def order(self, call: Call, engines: Sequence[EngineBooks]) -> list[EngineBooks]:
        """Return the engines in the order in which a call is to try them; there is one at least."""


class RoundRobin:
    """Each engine in its turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def order(self, call: Call, engines: Sequence[EngineBooks]) -> list[EngineBooks]:
        first = next(self._turns) % len(engines)
        return [*engines[first:], *engines[:first]]


class LeastLoaded:
    """The engine with the fewest tokens to compute; of equal ones that with the fewest calls so far."""

    def order(self, call: Call, engines: Sequence[EngineBooks]) -> list[EngineBooks]:
        return sorted(engines, key=_load)


class FewestRequests:
    """The engine with the fewest unfinished requests of the call's kind; of equal ones that with the fewest of all."""

    def order(self, call: Call, engines: Sequence[EngineBooks]) -> list[EngineBooks]:
        return sorted(engines, key=lambda each: (each.num_requests[call.kind], sum(each.num_requests.values())))


class Prefix:
    """The engine that is likely to have most of the prompt cached, unless it has far more to do than another.

    That is: ``_MOST_RATIO`` times the requests of the least loaded one, and ``_MOST_MORE`` more, as in SGLang's router.
    """

    _MOST_RATIO, _MOST_MORE = 1.5, 32

    def order(self, call: Call, engines: Sequence[EngineBooks]) -> list[EngineBooks]:
        counts = [sum(engine.num_requests.values()) for engine in engines]
        if max(counts) > max(self._MOST_RATIO * min(counts), min(counts) + self._MOST_MORE):
            return sorted(engines, key=_load)
        return sorted(engines, key=lambda engine: (-engine.num_cached(call), _load(engine)))


class Predicted:
    """Latency-sensitive calls where they keep their TTFT at the least cost to others, others where they end first.

    * Of the engines that predict a TTFT within the objective, the one that has to compute the fewest tokens for it: a
      prefill takes time from the decodes and the best-effort work beside it. Of equal ones, the one that predicts the
      shortest TTFT. The others follow in the order of their predictions.
    * A call without an objective goes where its first token is predicted first.
    * A best-effort call goes to the engine that would be the first to have done all the best-effort work that it has,
      by its rate of late: engines with much latency-sensitive work have lower ones.
    * What an engine does not predict is taken from its load, as ``least-loaded`` does.
    """

    _MARGIN = 0.2
    """Share of a TTFT objective that a prediction has to leave."""
    _SAME_TOKENS = 256
    """Numbers of tokens to compute that differ by less are taken for equal."""

    def order(self, call: Call, engines: Sequence[EngineBooks]) -> list[EngineBooks]:
        if call.kind is not ServiceClass.LS:
            return self._order_best_effort(call, engines)
        most_s = None if call.ttft_s is None else (1 - self._MARGIN) * call.ttft_s
        found: list[tuple[tuple[bool, float, float], EngineBooks]] = []
        for engine in engines:
            num_cached = engine.num_cached(call)
            ttft_s = engine.ttft_s(call, num_cached)
            if ttft_s is None:
                return sorted(engines, key=_load)
            if most_s is None or ttft_s > most_s:
                found.append(((True, ttft_s, engine.num_routed), engine))
            else:
                found.append(((False, -(num_cached // self._SAME_TOKENS), ttft_s), engine))
        return [engine for _, engine in sorted(found, key=_first)]

    def _order_best_effort(self, call: Call, engines: Sequence[EngineBooks]) -> list[EngineBooks]:
        rates = {engine.number: engine.be_rate for engine in engines}
        known = [rate for rate in rates.values() if rate]
        usual = sum(known) / len(known) if known else 1.0
        num_tokens = call.num_prompt_tokens

        def key(engine: EngineBooks) -> tuple[float, int, int]:
            # An engine whose best-effort work stands still gets little, but some: it may have had none.
            rate = rates[engine.number]
            if rate is None or not engine.num_requests[ServiceClass.BE]:
                rate = usual
            own = num_tokens - engine.num_cached(call)
            seconds = (engine.num_tokens[ServiceClass.BE] + own) / max(rate, usual / 16)
            return seconds, engine.num_tokens[ServiceClass.LS], engine.num_routed

        return sorted(engines, key=key)


_first = operator.itemgetter(0)


def _load(engine: EngineBooks) -> tuple[int, int]:
    return sum(engine.num_tokens.values()), engine.num_routed


ROUTERS: dict[str, Callable[[], Router]] = {
    "predicted": Predicted,
    "least-loaded": LeastLoaded,
    "fewest-requests": FewestRequests,
    "round-robin": RoundRobin,
    "prefix": Prefix,
}

"""What the dashboard shows of each engine, if there are several."""

from __future__ import annotations

import asyncio
import bisect
from typing import TYPE_CHECKING, Any

from omniserve.core.load import PROMPT_SIZES
from omniserve.core.request import ServiceClass
from omniserve.core.stats import EngineStats

if TYPE_CHECKING:
    from omniserve.routing.books import EngineBooks
    from omniserve.server.engines.fleet import Fleet
    from omniserve.server.engines.supervisor import EngineSupervisor

_PROMPT = 1024
"""Tokens of the prompt whose forecast is shown; one of PROMPT_SIZES."""


async def look_at(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the state, load, requests and KV of each engine, as plain data; nothing if there is one engine.

    An engine that is asked at the same time by others answers once for all.
    """
    replicas = fleet.replicas
    if not replicas:
        return []
    engines = [fleet.engines[books.number] for _, books in replicas]
    asked = (engine.client.stats() for engine, (is_open, _) in zip(engines, replicas, strict=True) if is_open)
    answers = iter(await asyncio.gather(*asked, return_exceptions=True))
    return [
        _row(engine, books, next(answers) if is_open else None)
        for engine, (is_open, books) in zip(engines, replicas, strict=True)
    ]


def _row(engine: EngineSupervisor, books: EngineBooks, stats: EngineStats | BaseException | None) -> dict[str, Any]:
    forecasts = {} if books.load is None else books.load.ttft_s
    place = bisect.bisect_left(PROMPT_SIZES, _PROMPT)
    known = stats if isinstance(stats, EngineStats) else None
    if known is not None:
        state = "up"
    else:
        state = "busy" if isinstance(stats, TimeoutError) else engine.failure or "it has ended"
    return {
        "number": books.number,
        "state": state,
        "retry_after_s": engine.retry_after_s if engine.failure is not None else None,
        "restarts": engine.num_restarts,
        "ls_requests": books.num_requests[ServiceClass.LS],
        "be_requests": books.num_requests[ServiceClass.BE],
        "calls": books.num_routed,
        "tokens": sum(books.num_tokens.values()),
        "ttft_s": min((forecast[place] for forecast in forecasts.values()), default=None),
        "be_rate": books.be_rate,
        "kv_device": None if known is None else _share(known.kv.device_used, known.kv.device_total),
        "kv_host": None if known is None else _share(known.kv.host_used, known.kv.host_total),
    }


def _share(used: int, total: int) -> float | None:
    return used / total if total else None

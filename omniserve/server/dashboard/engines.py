"""What the dashboard shows of each engine, if there are several."""

from __future__ import annotations

import asyncio
import bisect
from typing import TYPE_CHECKING, Any

from omniserve.core.load import PROMPT_SIZES
from omniserve.core.request import ServiceClass
from omniserve.core.stats import EngineStats

if TYPE_CHECKING:
    from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.placement import Member

_PROMPT = 1024
"""Tokens of the prompt whose forecast is shown; one of PROMPT_SIZES."""


async def look_at(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the state, load, requests and KV of each engine, as plain data; nothing if there was only ever one.

    An engine that is asked at the same time by others answers once for all.
    """
    if not fleet.replicas:
        return []
    shown = [(member, member.is_up) for member in fleet.members]
    asked = (member.engine.client.stats() for member, is_up in shown if is_up)
    answers = iter(await asyncio.gather(*asked, return_exceptions=True))
    return [_row(member, next(answers) if is_up else None) for member, is_up in shown]


def _row(member: Member, stats: EngineStats | BaseException | None) -> dict[str, Any]:
    engine, books = member.engine, member.books
    forecasts = {} if books.load is None else books.load.ttft_s
    place = bisect.bisect_left(PROMPT_SIZES, _PROMPT)
    known = stats if isinstance(stats, EngineStats) else None
    if known is not None:
        state = member.state
    else:
        state = "busy" if isinstance(stats, TimeoutError) else engine.failure or member.state
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

"""The dashboard as a part of a server: ``start`` when it serves, ``stop`` before it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import APIRouter

from omniserve.core.errors import EngineStopped
from omniserve.server.dashboard.history import History
from omniserve.server.dashboard.pages import router
from omniserve.server.dashboard.series import Reading, read
from omniserve.server.service import Service

logger = logging.getLogger(__name__)


class Dashboard:
    """The page and the history behind it."""

    def __init__(self) -> None:
        self._sampling: asyncio.Task[None] | None = None

    def start(self, service: Service) -> APIRouter:
        """Begin to take samples; return the routes."""
        history = History(lambda: _take_reading(service), service.info.classes)
        self._sampling = asyncio.create_task(history.keep())
        self._sampling.add_done_callback(_tell_failure)
        return router(history, _about(service))

    async def stop(self) -> None:
        """Take no more samples."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)


def _tell_failure(sampling: asyncio.Task[None]) -> None:
    if not sampling.cancelled() and (error := sampling.exception()) is not None:
        logger.error("the dashboard's charts stand still from now on", exc_info=error)


async def _take_reading(service: Service) -> Reading:
    """Look at what /metrics shows."""
    try:
        stats, state = await service.client.stats(), "up"
    except EngineStopped as error:
        stats, state = None, service.engine.failure or str(error)
    except TimeoutError:
        stats, state = None, "busy"
    metrics = service.metrics.collect(stats, num_restarts=service.engine.num_restarts)
    return read(metrics, clock_s=time.monotonic(), time_s=time.time(), engine=state)


def _about(service: Service) -> dict[str, Any]:
    """Return what the page has to know of the server."""
    return {
        "model": service.model_name,
        "chats": service.codec.has_chat_template,
        "max_tokens": service.info.limits.max_tokens,
        "classes": [
            {"name": spec.name, "kind": str(spec.kind), "ttft_slo": spec.slo.ttft_s, "tpot_slo": spec.slo.tpot_s}
            for spec in service.info.classes
        ],
    }

"""The dashboard as a part of a server: page and files, which hold no secret, and data, which may ask for a key."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from omniserve.core.errors import EngineStopped
from omniserve.server.dashboard.engines import look_at
from omniserve.server.dashboard.history import History
from omniserve.server.dashboard.series import Reading, read
from omniserve.server.errors import ApiError
from omniserve.server.service import Service

logger = logging.getLogger(__name__)

_PAGE = "/dashboard"
_FILES = f"{_PAGE}/static"

_FOLDER = Path(__file__).with_name("static")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What comes from here, and nothing else: no inline script or style, no other host, no frame around it; and no text ever
# becomes HTML or code (trusted types).
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Dashboard:
    """The page and the history behind it: ``start`` when the server serves, ``stop`` before it ends."""

    def __init__(self) -> None:
        self._sampling: asyncio.Task[None] | None = None
        self._engines: list[dict[str, Any]] = []
        """Each engine of several, at the last sample."""

    def start(self, service: Service) -> APIRouter:
        """Begin to take samples; return the routes."""
        history = History(lambda: self._take_reading(service), service.info.classes)
        self._sampling = asyncio.create_task(history.keep())
        self._sampling.add_done_callback(_tell_failure)
        return _router(history, _about(service), lambda: self._engines)

    async def stop(self) -> None:
        """Take no more samples."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)

    async def _take_reading(self, service: Service) -> Reading:
        reading, self._engines = await asyncio.gather(_take_reading(service), look_at(service.engine))
        return reading


def _tell_failure(sampling: asyncio.Task[None]) -> None:
    if not sampling.cancelled() and (error := sampling.exception()) is not None:
        logger.error("the dashboard's charts stand still from now on", exc_info=error)


async def _take_reading(service: Service) -> Reading:
    """Look at what /metrics shows."""
    try:
        stats, state = await service.engine.stats(), "up"
    except EngineStopped as error:
        stats, state = None, service.engine.failure or str(error)
    except TimeoutError:
        stats, state = None, "busy"
    await service.gather_counts()
    metrics = service.metrics.collect(stats, service.engine)
    reading = read(metrics, clock_s=time.monotonic(), time_s=time.time(), engine=state)
    service.metrics.scaling.note(reading, len(service.engine.clients))
    return reading


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


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = _HEADERS | {"ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def _router(
    history: History, about: Mapping[str, Any], engines: Callable[[], Sequence[Mapping[str, Any]]]
) -> APIRouter:
    """Return the routes; ``about`` and ``engines`` are what the page is told about the server, as plain data."""
    routes, files = APIRouter(), _read_files()

    @routes.get(_PAGE, include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].answer(request)

    @routes.get(f"{_FILES}/{{name:path}}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(request)

    @routes.get(f"{_PAGE}/data", include_in_schema=False)
    async def data(request: Request) -> Response:
        since, run = request.query_params.get("since", "-1"), request.query_params.get("run")
        try:
            number = int(since)
        except ValueError:
            message = f"since must be the number of the last sample that you have, or -1 for none; got {since[:80]!r}"
            raise ApiError(message, param="since", code="invalid_value") from None
        news = history.since(run, number) | {"about": about, "engines": engines()}
        return JSONResponse(news, headers={"Cache-Control": "no-store"})

    return routes


def _read_files() -> dict[str, _File]:
    """Return what is in the folder by its path, read once: no request can reach any other file."""
    files = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[path.relative_to(_FOLDER).as_posix()] = _File(content, _TYPES[path.suffix], etag)
    return files

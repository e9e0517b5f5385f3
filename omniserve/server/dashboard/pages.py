"""The routes: the page and its files, which hold no secret, and the data, which may ask for a key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from omniserve.server.dashboard.history import History
from omniserve.server.errors import ApiError

PAGE = "/dashboard"
FILES = f"{PAGE}/static"

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


def router(history: History, about: Mapping[str, Any]) -> APIRouter:
    """Return the routes; ``about`` is what the page is told about the server, as plain data."""
    routes, files = APIRouter(), _read_files()

    @routes.get(PAGE, include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].answer(request)

    @routes.get(f"{FILES}/{{name:path}}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(request)

    @routes.get(f"{PAGE}/data", include_in_schema=False)
    async def data(request: Request) -> Response:
        since, run = request.query_params.get("since", "-1"), request.query_params.get("run")
        try:
            number = int(since)
        except ValueError:
            message = f"since must be the number of the last sample that you have, or -1 for none; got {since[:80]!r}"
            raise ApiError(message, param="since", code="invalid_value") from None
        return JSONResponse(history.since(run, number) | {"about": about}, headers={"Cache-Control": "no-store"})

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

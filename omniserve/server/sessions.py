"""Sessions behind the API: which one a request belongs to, and the call that clears the prefix cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from omniserve.server.access.limits import BodyReader, caller_of, take_body
from omniserve.server.engines.fleet import Fleet
from omniserve.server.errors import ApiError
from omniserve.server.fields import StrictModel, UnknownFields, ignored_header, read_fields, validate
from omniserve.server.openapi import CacheCleared, answers, takes

_ERRORS = (400, 403, 408, 413, 429, 503)


def session_name(key: str | None, caller: str | None) -> str:
    """Return the engine's name of a session; the same key of two callers stands for two sessions.

    Args:
        key: What the request says; None or empty: it names none.
        caller: The name of its API key.
    """
    if not key:
        return ""
    caller = caller or ""
    return hashlib.blake2b(f"{len(caller)} {caller} {key}".encode(errors="surrogatepass"), digest_size=16).hexdigest()


class ClearCacheRequest(StrictModel):
    """Body of /v1/cache/clear; it may be empty."""

    prompt_cache_key: str | None = Field(None, min_length=1)
    """The sessions of this name, of all callers; None: the whole cache."""


def router(
    engine: Fleet, bodies: BodyReader, unknown_fields: UnknownFields, callers: Sequence[str | None]
) -> APIRouter:
    """Return the route.

    Args:
        engine: The engines.
        callers: The names of all API keys; one None: no keys are asked for.
    """
    routes = APIRouter()

    body_or_none = {"requestBody": takes(ClearCacheRequest)["requestBody"] | {"required": False}}

    @routes.post("/v1/cache/clear", openapi_extra=body_or_none, responses=answers(CacheCleared, *_ERRORS))
    async def clear(http: Request) -> Response:
        if not caller_of(http).is_admin:
            raise ApiError("only keys with 'admin: true' in the key file may clear the cache", status=403)
        async with take_body(http, bodies) as body:
            request = validate(ClearCacheRequest, read_fields(body or b"{}"), unknown_fields)
        key = request.prompt_cache_key
        names = None if key is None else [session_name(key, caller) for caller in callers]
        freed = await engine.clear_cache(names)
        blocks = {"device": freed.device, "host": freed.host, "disk": freed.disk}
        answer = {
            "object": "cache.cleared",
            "prompt_cache_key": key,
            "freed_blocks": blocks,
            "freed_tokens": {tier: count * freed.block_size for tier, count in blocks.items()},
        }
        return JSONResponse(answer, headers=ignored_header(request))

    return routes

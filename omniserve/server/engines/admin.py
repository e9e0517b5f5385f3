"""The routes of ``/admin/engines``, with which an operator lists, adds, drains, resumes and removes engines.

The calls take keys with ``admin: true``, or anyone if the server asks for no keys. An engine can be added at an address
only if the server was told at its start that this address may be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from omniserve.server.access.limits import BodyReader, caller_of, take_body
from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.placement import Member
from omniserve.server.engines.sources import Places
from omniserve.server.errors import ApiError
from omniserve.server.fields import StrictModel, UnknownFields, ignored_header, read_fields, validate
from omniserve.server.openapi import answers, asks, takes

_REFUSALS = (400, 403, 404, 409)


class AddEngineRequest(StrictModel):
    """Body of POST /admin/engines; it may be empty."""

    address: str | None = Field(None, min_length=1, max_length=256)
    """The address that an engine on another machine listens at; None: start one on this machine."""


class RemoveQuery(BaseModel):
    """The query of DELETE /admin/engines/ID."""

    timeout_s: float = Field(600.0, ge=0, le=86400, allow_inf_nan=False)
    """Seconds that the engine's requests have to end."""


class EngineState(BaseModel):
    """An engine in the answers of /admin/engines."""

    object: Literal["engine"]
    id: int
    address: str
    """The address of an engine on another machine; ``local:0`` is the first share of this one."""
    state: Literal["joining", "up", "draining", "leaving", "down"]
    failure: str | None
    """The reason why it is not up."""
    requests: Mapping[str, int]
    """Requests that it has, by kind; of a server's only engine these are not counted by kind."""
    num_requests: int
    calls: int
    """Calls that it got so far."""
    restarts: int
    ttft_s: Mapping[str, float]
    """By latency-sensitive class: the TTFT that it predicts for a prompt of one token now."""
    be_tokens_per_s: float | None


class EngineStates(BaseModel):
    """Answer of GET /admin/engines."""

    object: Literal["list"]
    data: list[EngineState]


def state_of(member: Member) -> dict[str, Any]:
    """Return an engine's state as JSON."""
    books, load = member.books, member.books.load
    return {
        "object": "engine",
        "id": member.number,
        "address": member.source.name,
        "state": member.state,
        "failure": member.engine.failure,
        "requests": {str(kind): count for kind, count in books.num_requests.items()},
        "num_requests": member.engine.client.num_requests,
        "calls": books.num_routed,
        "restarts": member.engine.num_restarts,
        "ttft_s": {} if load is None else {name: seconds[0] for name, seconds in load.ttft_s.items()},
        "be_tokens_per_s": books.be_rate,
    }


def router(engine: Fleet, places: Places, bodies: BodyReader, unknown_fields: UnknownFields) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/admin/engines")

    def check_admin(http: Request) -> None:
        if not caller_of(http).is_admin:
            raise ApiError("only keys with 'admin: true' in the key file may see and change the engines", status=403)

    def chosen(http: Request, text: str) -> int:
        check_admin(http)
        caller_of(http).admit()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1

    @routes.get("", responses=answers(EngineStates, 403))
    async def list_engines(http: Request) -> Response:
        check_admin(http)
        return JSONResponse({"object": "list", "data": [state_of(member) for member in engine.members]})

    @routes.post(
        "",
        openapi_extra={"requestBody": takes(AddEngineRequest)["requestBody"] | {"required": False}},
        responses=answers(EngineState, 400, 403, 408, 409, 413, 429),
    )
    async def add(http: Request) -> Response:
        check_admin(http)
        async with take_body(http, bodies) as body:
            request = validate(AddEngineRequest, read_fields(body or b"{}"), unknown_fields)
        used = {member.source.name for member in engine.members}
        source = places.local(used) if request.address is None else places.at(request.address, used)
        return JSONResponse(state_of(engine.add(source)), headers=ignored_header(request))

    @routes.post("/{engine_id}/drain", responses=answers(EngineState, *_REFUSALS, 429))
    async def drain(engine_id: str, http: Request) -> Response:
        return JSONResponse(state_of(engine.drain(chosen(http, engine_id))))

    @routes.post("/{engine_id}/resume", responses=answers(EngineState, *_REFUSALS, 429))
    async def resume(engine_id: str, http: Request) -> Response:
        return JSONResponse(state_of(engine.resume(chosen(http, engine_id))))

    @routes.delete("/{engine_id}", openapi_extra=asks(RemoveQuery), responses=answers(EngineState, *_REFUSALS, 429))
    async def remove(engine_id: str, http: Request) -> Response:
        number = chosen(http, engine_id)
        query = validate(RemoveQuery, dict(http.query_params), unknown_fields)
        return JSONResponse(state_of(engine.remove(number, query.timeout_s)))

    return routes

"""The paths under /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from omniserve.server.access.limits import caller_of, take_body
from omniserve.server.errors import ApiError
from omniserve.server.fields import ignored_header, validate
from omniserve.server.generate import generate
from omniserve.server.openapi import (
    GENERATION_ERRORS,
    STORAGE_ERRORS,
    DeletedResponse,
    InputTokens,
    ItemPage,
    ResponseObject,
    answers,
    asks,
    takes,
)
from omniserve.server.prompts import num_chat_tokens
from omniserve.server.responses.background import BackgroundRuns
from omniserve.server.responses.fields import CreateResponse
from omniserve.server.responses.reading import read_request
from omniserve.server.responses.shape import ResponseShape
from omniserve.server.responses.store import ResponseStore
from omniserve.server.service import Service
from omniserve.server.tokenizing.text import TooManyTokens

_ONE = "/v1/responses/{response_id}"
_RUNNING = ("queued", "in_progress")


class ResponseQuery(BaseModel):
    """The query of a response; ``include`` is taken and without effect."""

    model_config = ConfigDict(extra="ignore")

    stream: bool = False
    starting_after: int | None = Field(None, ge=0)
    """The number of the last event that the client has."""


class ItemQuery(BaseModel):
    """The query of a response's input."""

    model_config = ConfigDict(extra="ignore")

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


def router(service: Service) -> APIRouter:
    """Return the routes. Where API keys are asked for, each key's responses are its own."""
    routes = APIRouter()
    runs = BackgroundRuns(service.limits.stream_comment_interval_s)

    @routes.post(
        "/v1/responses",
        openapi_extra=takes(CreateResponse),
        responses=answers(ResponseObject, *GENERATION_ERRORS, streams=True),
    )
    async def create(request: Request) -> Response:
        return await generate(service, request, ResponseShape, runs.detach)

    @routes.post(
        "/v1/responses/input_tokens",
        openapi_extra=takes(CreateResponse),
        responses=answers(InputTokens, *GENERATION_ERRORS),
    )
    async def count(request: Request) -> Response:
        """Tell how many tokens the prompt of a request would have."""
        async with take_body(request, service.bodies) as body:
            asked = await read_request(service, body, caller=caller_of(request).name, default_model=service.model_name)
            service.check_model(asked.model)
            most = service.most_countable_tokens
            try:
                number = await num_chat_tokens(service.codec, asked, most=most)
            except TooManyTokens as error:
                raise ApiError(
                    f"the input has more than {most} tokens, of which the model takes {service.info.limits.max_tokens}",
                    param="input",
                    code="context_length_exceeded",
                ) from error
            found = {"object": "response.input_tokens", "input_tokens": number}
            return JSONResponse(found, headers=ignored_header(asked))

    @routes.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        raise ApiError("conversations are not compacted here; send fewer items", status=404, code="not_supported")

    @routes.get(
        _ONE, openapi_extra=asks(ResponseQuery), responses=answers(ResponseObject, *STORAGE_ERRORS, streams=True)
    )
    async def retrieve(request: Request, response_id: str) -> Response:
        query = validate(ResponseQuery, dict(request.query_params), service.unknown_fields)
        response = await _store(service).get(response_id, caller_of(request).name)
        run = runs.find(response_id)
        if query.stream and run is None:
            raise ApiError(
                "the events of this response are not kept, or not any more; ask for it without stream",
                param="stream",
                code="invalid_value",
            )
        if query.stream and run is not None:
            return runs.stream(run, -1 if query.starting_after is None else query.starting_after)
        return JSONResponse(response if run is None else run.response())

    @routes.delete(_ONE, responses=answers(DeletedResponse, *STORAGE_ERRORS))
    async def delete(request: Request, response_id: str) -> Response:
        await _store(service).delete(response_id, caller_of(request).name)
        runs.forget(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.post(f"{_ONE}/cancel", responses=answers(ResponseObject, *STORAGE_ERRORS))
    async def cancel(request: Request, response_id: str) -> Response:
        store = _store(service)
        response = await store.get(response_id, caller_of(request).name)
        if not response["background"]:
            raise ApiError(
                f"the response {response_id!r} does not run in the background; close its connection to end it",
                code="invalid_value",
            )
        if (run := runs.find(response_id)) is not None:
            return JSONResponse(await run.cancel())
        if response["status"] in _RUNNING:  # at another server, which looks now and then
            response["status"] = "cancelled"
            if not await store.change(response_id, response, alive_s=None):  # it has ended meanwhile
                response = await store.get(response_id, caller_of(request).name)
        return JSONResponse(response)

    @routes.get(f"{_ONE}/input_items", openapi_extra=asks(ItemQuery), responses=answers(ItemPage, *STORAGE_ERRORS))
    async def input_items(request: Request, response_id: str) -> Response:
        query = validate(ItemQuery, dict(request.query_params), service.unknown_fields)
        items = await _store(service).input_items(response_id, caller_of(request).name)
        return JSONResponse(_page(items if query.order == "asc" else items[::-1], query))

    return routes


def _store(service: Service) -> ResponseStore:
    if service.responses is None:
        raise ApiError("this server stores no responses", status=503, code="storage_error")
    return service.responses


def _page(items: list[dict[str, Any]], query: ItemQuery) -> dict[str, Any]:
    if query.after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == query.after), None)
        if place is None:
            raise ApiError(f"there is no item {query.after!r}", status=404, param="after", code="item_not_found")
        items = items[place + 1 :]
    page = items[: query.limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, "has_more": len(items) > len(page), **ends}

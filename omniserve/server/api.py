"""The HTTP routes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from omniserve import __version__
from omniserve.core.errors import EngineStopped
from omniserve.server import answer_models, health, tokenize
from omniserve.server.access import Gate, caller_of, is_free
from omniserve.server.answers import ENDPOINTS, AnswerShape, Endpoint
from omniserve.server.errors import CLIENT_CLOSED_REQUEST, ApiError, milliseconds
from omniserve.server.keys import KeyRing
from omniserve.server.openapi import GENERATION_ERRORS, answers, document, takes
from omniserve.server.output_stream import OutputStream
from omniserve.server.protocol import ChatRequest, CompletionRequest, parse
from omniserve.server.request_ids import RequestIds
from omniserve.server.service import Service, new_call_id
from omniserve.server.streaming import ClientGone, EventStream, or_disconnect
from omniserve.server.traces import TraceCalls, Traces

_PREDICTED_TTFT_HEADER = "x-omniserve-predicted-ttft-ms"
# Stands for service_tier where a program cannot set that.
_SERVICE_TIER_HEADER = "x-omniserve-service-tier"


def create_app(
    service: Service,
    *,
    routers: Sequence[APIRouter] = (),
    keys: KeyRing | None = None,
    guard_all: bool = False,
    cors_origins: Sequence[str] = (),
    traces: Traces | None = None,
) -> ASGIApp:
    """Return the ASGI application of a service.

    Args:
        service: What is behind the routes.
        routers: More routes, behind the same keys.
        keys: Who may call; None: everybody.
        guard_all: Ask for a key for health and metrics, too.
        cors_origins: Whose pages may call from a browser; ``*`` for all.
        traces: Told of completions and chats when they are over; None: nobody is.
    """
    app = FastAPI(title="OmniServe", openapi_url=None)
    created = int(time.time())
    model = {"id": service.model_name, "object": "model", "created": created, "owned_by": "omniserve"}

    @app.post(
        "/v1/completions",
        openapi_extra=takes(CompletionRequest),
        responses=answers(answer_models.Completion, *GENERATION_ERRORS, streams=True),
    )
    async def completions(request: Request) -> Response:
        return await _generate(service, request, ENDPOINTS["/v1/completions"])

    @app.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatRequest),
        responses=answers(answer_models.ChatCompletion, *GENERATION_ERRORS, streams=True),
    )
    async def chat_completions(request: Request) -> Response:
        return await _generate(service, request, ENDPOINTS["/v1/chat/completions"])

    app.include_router(tokenize.router(service, functools.partial(_take_body, service)))

    @app.get("/v1/models", responses=answers(answer_models.ModelList))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}", responses=answers(answer_models.Model, 404))
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model)

    for router in (health.router(service), *routers):
        app.include_router(router)

    @app.get("/metrics", response_class=PlainTextResponse, responses=answers(None, 503, media_type="text/plain"))
    async def metrics() -> Response:
        try:
            stats = await service.client.stats()
        except EngineStopped:
            stats = None
        except TimeoutError:
            raise ApiError("the engine is in a long step; ask again", status=503, retry_after_s=1) from None
        body = service.metrics.render(stats, num_restarts=service.engine.num_restarts)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    def refuse(request: Request, error: ApiError) -> Response:
        request.state.refusal = error
        service.metrics.refused(error)
        return error.response()

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return refuse(request, error)

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        response = refuse(
            request, ApiError(f"{message}; the API is under /v1, see /v1/models", status=error.status_code)
        )
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refuse(request, ApiError(f"internal error ({type(error).__name__}); see the server's log", status=500))

    described = document(
        app.routes,
        version=__version__,
        is_guarded=lambda path: keys is not None and not is_free(path, guard_all),
    )

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(described)

    if keys is not None:
        app.add_middleware(Gate, ring=keys, guard_all=guard_all, on_refused=service.metrics.refused)
    if cors_origins:  # added last, so it is outermost: a browser asks without a key what it may send
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return RequestIds(
        app if traces is None else TraceCalls(app, traces)
    )  # around it all, so that internal errors have ids, too


@dataclass(frozen=True, slots=True)
class _Call:
    """What is left of a request once its prompt is token ids: its texts need not wait in memory with them."""

    outputs: OutputStream
    shape: AnswerShape
    stream: bool
    include_usage: bool


@contextlib.asynccontextmanager
async def _take_body(service: Service, http: Request) -> AsyncIterator[bytes]:
    """Count a call for its caller, then hold its body."""
    caller_of(http).admit()
    async with service.bodies.hold(http) as body:
        yield body


async def _begin(service: Service, http: Request, endpoint: Endpoint) -> _Call:
    arrival_s = time.monotonic()
    service.check_open()
    async with _take_body(service, http) as body:
        request = parse(endpoint.request_kind, body, default_tier=http.headers.get(_SERVICE_TIER_HEADER))
        request = caller_of(http).limited(request, service.info.classes)
        service.check_model(request.model)
        call_id = new_call_id(endpoint.id_prefix)
        shape = endpoint.shape(service, request, call_id)
        outputs = http.state.outputs = await service.begin(request, call_id, arrival_s)
        return _Call(outputs, shape, request.stream, request.include_usage)


async def _generate(service: Service, http: Request, endpoint: Endpoint) -> Response:
    call = await _begin(service, http, endpoint)
    outputs, caller = call.outputs, caller_of(http)

    def end() -> None:
        service.end(outputs)
        caller.use_tokens(outputs.usage.num_output_tokens)

    handed_over = False
    try:
        await or_disconnect(http.receive, outputs.start())
        caller.use_tokens(outputs.usage.num_prompt_tokens)
        predicted_ms = milliseconds(outputs.predicted_ttft_s)
        headers = {} if predicted_ms is None else {_PREDICTED_TTFT_HEADER: str(predicted_ms)}
        if call.stream:
            handed_over = True
            return EventStream(
                outputs,
                call.shape,
                headers=headers,
                include_usage=call.include_usage,
                stall_timeout_s=service.limits.stall_timeout_s,
                on_close=end,
            )
        deltas = await or_disconnect(http.receive, outputs.collect())
        answer = call.shape.answer(deltas, outputs.usage.as_dict())
        return Response(answer, headers=headers, media_type="application/json")
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not handed_over:
            end()

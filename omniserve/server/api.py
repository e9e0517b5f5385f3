"""The HTTP routes."""

from __future__ import annotations

import time
from http import HTTPStatus

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from omniserve.errors import EngineStopped
from omniserve.server import health, tokenize
from omniserve.server.answers import collect
from omniserve.server.calls import ENDPOINTS, Endpoint
from omniserve.server.errors import ApiError, milliseconds
from omniserve.server.protocol import parse
from omniserve.server.service import Service, new_call_id
from omniserve.server.streaming import ClientGone, EventStream, or_disconnect

_MAX_BODY_BYTES = 32 << 20
_PREDICTED_TTFT_HEADER = "x-omniserve-predicted-ttft-ms"
# Stands for service_tier where a program cannot set that.
_SERVICE_TIER_HEADER = "x-omniserve-service-tier"
_CLIENT_CLOSED_REQUEST = 499  # as nginx has it; nobody reads it


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application of a service."""
    # The routes check their bodies themselves (see protocol), so there is no schema to show.
    app = FastAPI(title="OmniServe", openapi_url=None)
    created = int(time.time())
    model = {"id": service.model_name, "object": "model", "created": created, "owned_by": "omniserve"}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(service, request, ENDPOINTS["/v1/completions"])

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(service, request, ENDPOINTS["/v1/chat/completions"])

    app.include_router(tokenize.router(service, _body))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model)

    app.include_router(health.router(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await service.client.stats()
        except EngineStopped:
            stats = None
        except TimeoutError:
            raise ApiError("the engine is in a long step; ask again", status=503, retry_after_s=1) from None
        body = service.metrics.render(stats, num_restarts=service.engine.num_restarts)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        return ApiError(f"{message}; the API is under /v1, see /v1/models", status=error.status_code).response()

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return ApiError(f"internal error ({type(error).__name__}); see the server's log", status=500).response()

    return app


async def _generate(service: Service, http: Request, endpoint: Endpoint) -> Response:
    arrival_s = time.monotonic()
    service.check_open()
    request = parse(endpoint.request_kind, await _body(http), default_tier=http.headers.get(_SERVICE_TIER_HEADER))
    service.check_model(request.model)
    call_id = new_call_id(endpoint.id_prefix)
    generation = await service.begin(request, call_id, arrival_s)
    shape = endpoint.shape(service, request, call_id)
    handed_over = False
    try:
        await or_disconnect(http.receive, generation.start())
        predicted_ms = milliseconds(generation.predicted_ttft_s)
        headers = {} if predicted_ms is None else {_PREDICTED_TTFT_HEADER: str(predicted_ms)}
        if request.stream:
            handed_over = True
            return EventStream(
                generation,
                shape,
                headers=headers,
                include_usage=request.include_usage,
                on_close=lambda: service.end(generation),
            )
        deltas = await or_disconnect(http.receive, collect(generation))
        body = shape.answer(deltas, generation.usage.as_dict())
        return Response(body, headers=headers, media_type="application/json")
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        if not handed_over:
            service.end(generation)


async def _body(http: Request) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > _MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {_MAX_BODY_BYTES >> 20} MiB; send less", status=413)
        parts.append(part)
    return b"".join(parts)

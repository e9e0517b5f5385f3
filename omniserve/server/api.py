"""The HTTP application: its routes, what errors are answered with, what is around it all.

Routes that generate are in ``generate``, those of the tokenizer in ``tokenize``, of files and batches in
``batches.routes``, of the page in ``dashboard.pages``; all others are here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from omniserve.server import answer_models, generate, tokenize
from omniserve.server.connections import RequestLog
from omniserve.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from omniserve.server.keys import KeyRing
from omniserve.server.limits import Gate, is_free
from omniserve.server.openapi import answers, document
from omniserve.server.service import Service
from omniserve.server.traces import Traces


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
        keys: Keys of which each call needs one; None: it needs none.
        guard_all: Ask for a key for health and metrics, too.
        cors_origins: Origins whose pages may call from a browser; ``*`` for all.
        traces: Told of completions and chats when they are over.
    """
    app = FastAPI(title="OmniServe", openapi_url=None)
    ours = [generate.router(service), tokenize.router(service), _models(service), _health(service)]
    for router in (*ours, *routers, _metrics(service)):
        app.include_router(router)
    _answer_errors(app, service)
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
    return RequestLog(app, traces)  # around it all, so that internal errors have ids, too


def _models(service: Service) -> APIRouter:
    """Return /v1/models and /v1/models/NAME."""
    routes = APIRouter()
    created = int(time.time())
    model = {"id": service.model_name, "object": "model", "created": created, "owned_by": "omniserve"}

    @routes.get("/v1/models", responses=answers(answer_models.ModelList))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @routes.get("/v1/models/{name:path}", responses=answers(answer_models.Model, 404))
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model)

    return routes


def _health(service: Service) -> APIRouter:
    """Return /health, /health/live and /health/ready; the port opens when the engine is ready for the first time."""
    routes = APIRouter()

    @routes.get("/health/live", responses=answers(answer_models.Status))
    async def live() -> Response:
        """Answer 200 as long as the process can answer: while the engine is started again, too."""
        return JSONResponse({"status": "ok"})

    @routes.get("/health", responses=answers(answer_models.Status, 503))
    @routes.get("/health/ready", responses=answers(answer_models.Status, 503))
    async def ready() -> Response:
        """Answer 200 while new calls are taken, else 503 with the reason."""
        service.check_open()
        return JSONResponse({"status": "ok"})

    return routes


def _metrics(service: Service) -> APIRouter:
    """Return /metrics."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse, responses=answers(None, 503, media_type="text/plain"))
    async def metrics() -> Response:
        try:
            stats = await service.client.stats()
        except EngineStopped:
            stats = None
        except TimeoutError:
            raise ApiError("the engine is in a long step; ask again", status=503, retry_after_s=1) from None
        body = service.metrics.render(stats, num_restarts=service.engine.num_restarts)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    return routes


def _answer_errors(app: FastAPI, service: Service) -> None:
    """Answer every error in OpenAI's shape, and count it."""

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

"""The HTTP application: its routes, what errors are answered with, what is around it all.

Routes that generate are in ``generate``, those of files and batches in ``batches.routes``, of the page in
``dashboard.serving``; all others are here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field, model_validator
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp

from omniserve.core.errors import EngineStopped
from omniserve.core.version import __version__
from omniserve.server import generate, loras, openapi, sessions
from omniserve.server.access.keys import ApiKey, KeyRing
from omniserve.server.access.limits import Caller, Gate, is_free, take_body
from omniserve.server.access.origins import PageGuard, is_loopback
from omniserve.server.anthropic import routes as anthropic
from omniserve.server.anthropic.errors import error_response, speaks_anthropic
from omniserve.server.completions.messages import MAX_MESSAGES, Message, Tool
from omniserve.server.completions.protocol import MAX_TOOLS, TemplateFields
from omniserve.server.connections import HeadAsGet, RequestLog, UnderPath
from omniserve.server.direct_routes import DirectRoutes
from omniserve.server.embeddings import routes as embedding_routes
from omniserve.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from omniserve.server.fields import StrictModel, ignored_header, read_fields, validate
from omniserve.server.openapi import answers, takes
from omniserve.server.responses import routes as responses
from omniserve.server.service import Service
from omniserve.server.tokenizing.text import TooManyTokens

if TYPE_CHECKING:
    from omniserve.server.telemetry.otlp import OtlpTraces


def create_app(
    service: Service,
    *,
    routers: Sequence[APIRouter] = (),
    keys: KeyRing | None = None,
    guard_all: bool = False,
    cors_origins: Sequence[str] = (),
    host: str = "127.0.0.1",
    root_path: str = "",
    traces: OtlpTraces | None = None,
    caller: Callable[[ApiKey], Caller] = Caller,
) -> ASGIApp:
    """Return the ASGI application of a service; the options are those of ``ServerOptions``.

    Args:
        routers: More routes, behind the same keys.
        traces: It is told of completions and chats when they are over.
        caller: Makes the caller of a key.
    """
    app = FastAPI(title="OmniServe", openapi_url=None)
    adapters = loras.router(service.loras, service.engine, service.bodies, service.unknown_fields)
    callers = [None] if keys is None else [key.name for key in keys.keys]
    all_routers = (
        generate.router(service),
        responses.router(service),
        anthropic.router(service),
        embedding_routes.router(service),
        _tokenizer(service),
        _state(service),
        adapters,
        sessions.router(service.engine, service.bodies, service.unknown_fields, callers),
        *routers,
    )
    for router in all_routers:
        app.include_router(router)
    _answer_errors(app, service)
    document = openapi.document(
        app.routes, version=__version__, is_guarded=lambda path: keys is not None and not is_free(path, guard_all)
    )

    @app.get("/openapi.json", include_in_schema=False)
    async def describe() -> Response:
        return JSONResponse(document)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("dashboard")  # from here, wherever a proxy has put the server

    inner: ASGIApp = HeadAsGet(DirectRoutes(app, [route for router in all_routers for route in router.routes]))
    if keys is not None:
        inner = Gate(inner, ring=keys, guard_all=guard_all, on_refused=service.metrics.refused, caller=caller)
    if cors_origins:  # around the gate: a browser asks without a key what it may send
        inner = CORSMiddleware(
            inner, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    if keys is None:
        inner = PageGuard(
            inner, origins=cors_origins, on_loopback=is_loopback(host), on_refused=service.metrics.refused
        )
    outermost = RequestLog(inner, traces)  # around it all, so that internal errors have ids, too
    return UnderPath(outermost, root_path) if root_path else outermost


# Errors of the tokenizer's routes.
_ERRORS = (400, 404, 408, 413, 429, 503)


class TokenizeRequest(TemplateFields):
    """Body of /tokenize: a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. None: added to a text, as /v1/completions does, but not to messages, as their
    template writes them."""
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _either(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            if ("prompt" in fields) == ("messages" in fields):
                raise ValueError("give prompt or messages, one of them")
            of_chats = ("chat_template_kwargs", "continue_final_message", "documents", "tools")
            if "prompt" in fields and (given := [name for name in of_chats if fields.get(name)]):
                raise ValueError(f"{given[0]} is for messages; remove it")
        return fields


class DetokenizeRequest(StrictModel):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _tokenizer(service: Service) -> APIRouter:
    """Return /tokenize and /detokenize: the model's tokenizer, with vLLM's fields."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=answers(openapi.Tokens, *_ERRORS))
    async def tokenize(http: Request) -> Response:
        async with take_body(http, service.bodies) as body:
            request = validate(TokenizeRequest, read_fields(body), service.unknown_fields)
            service.check_model(request.model)
            most = service.most_countable_tokens
            try:
                if request.messages is not None:
                    messages = [message.for_template() for message in request.messages]
                    tokens = await service.codec.encode_chat(
                        messages,
                        tools=[tool.for_template() for tool in request.tools],
                        options=request.template_options,
                        add_special_tokens=request.add_special_tokens is True,
                        most=most,
                    )
                else:
                    assert request.prompt is not None
                    special = request.add_special_tokens is not False
                    tokens = await service.codec.encode(request.prompt, add_special_tokens=special, most=most)
            except TooManyTokens as error:
                raise ApiError(
                    f"the text has more than {most} tokens, far more than a request may have; send parts of it",
                    param="prompt" if request.messages is None else "messages",
                    code="context_length_exceeded",
                ) from error
        pieces = await service.codec.token_texts(tokens) if request.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": service.info.limits.max_tokens,
            "tokens": tokens,
            "token_strs": pieces,
        }
        return JSONResponse(answer, headers=ignored_header(request))

    @routes.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=answers(openapi.Text, *_ERRORS))
    async def detokenize(http: Request) -> Response:
        async with take_body(http, service.bodies) as body:
            request = validate(DetokenizeRequest, read_fields(body), service.unknown_fields)
            service.check_model(request.model)
            service.prompts.check_token_ids(request.tokens, "the token id {} is unknown:", param="tokens")
            text = await service.codec.decode(request.tokens)
            return JSONResponse({"prompt": text}, headers=ignored_header(request))

    return routes


def _state(service: Service) -> APIRouter:
    """Return /v1/models, /health and /metrics; the port opens when the engine is ready for the first time."""
    routes = APIRouter()
    base = {"object": "model", "created": int(time.time()), "owned_by": "omniserve"}
    second = () if service.second is None else (service.second.name,)
    models_by_name = {name: {"id": name, **base} for name in (*service.model_names, *second)}

    @routes.get("/v1/models", responses=answers(openapi.ModelList))
    async def models(http: Request) -> Response:
        cards = [*models_by_name.values(), *service.loras.cards()]
        if speaks_anthropic(http.scope):
            return JSONResponse(anthropic.model_list(cards, service.info.limits.max_tokens))
        return JSONResponse({"object": "list", "data": cards})

    @routes.get("/v1/models/{name:path}", responses=answers(openapi.Model, 404))
    async def one_model(name: str, http: Request) -> Response:
        card = models_by_name.get(name)
        if card is None:
            lora = service.lora_of(name)
            card = next(each for each in service.loras.cards() if each["id"] == lora)
        if speaks_anthropic(http.scope):
            card = anthropic.model(card, service.info.limits.max_tokens)
        return JSONResponse(card)

    @routes.get("/health/live", responses=answers(openapi.Status))
    async def live() -> Response:
        """Answer 200 as long as the process can answer: while the engine is started again, too."""
        return JSONResponse({"status": "ok"})

    @routes.get("/health", responses=answers(openapi.Status, 503))
    @routes.get("/health/ready", responses=answers(openapi.Status, 503))
    async def ready() -> Response:
        """Answer 200 while new calls are taken, else 503 with the reason."""
        service.check_open()
        return JSONResponse({"status": "ok"})

    @routes.get("/metrics", response_class=PlainTextResponse, responses=answers(None, 503, media_type="text/plain"))
    async def metrics() -> Response:
        try:
            stats = await service.engine.stats()
        except EngineStopped:
            stats = None
        except TimeoutError:
            raise ApiError("the engine is in a long step; ask again", status=503, retry_after_s=1) from None
        await service.gather_counts()
        body = service.metrics.render(stats, service.engine)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    return routes


def _answer_errors(app: FastAPI, service: Service) -> None:
    """Answer every error in the shape of the API that the request speaks, and count it."""

    def refuse(request: Request, error: ApiError) -> Response:
        request.state.refusal = error
        service.metrics.refused(error)
        return error_response(error, request.scope)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return refuse(request, error)

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        allowed = (error.headers or {}).get("Allow")
        hint = _meant_path(app, request) if allowed is None else f"it takes {allowed}"
        response = refuse(request, ApiError(f"{message}; {hint}", status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refuse(request, ApiError(f"internal error ({type(error).__name__}); see the server's log", status=500))


def _meant_path(app: FastAPI, request: Request) -> str:
    """Return what to say of a path that does not exist: the one that was meant, or where they are listed."""
    path = request.url.path
    bare = path[path.rfind("/v1/") + len("/v1") :] if "/v1/" in path else path
    meant = [name for name in (f"/v1{bare}", bare) if name != path and _exists(app, request, name)]
    if meant:
        where = "the API is under /v1" if meant[0].startswith("/v1/") else "this is not under /v1"
        return f"{where}: did you mean {meant[0]}?"
    return "see /openapi.json" if path.startswith("/v1/") else "the API is under /v1, see /openapi.json"


def _exists(app: FastAPI, request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)

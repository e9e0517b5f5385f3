"""What a process that answers HTTP is made of: the service of a model's texts, the application, and its server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter
from starlette.types import ASGIApp

from omniserve.core.errors import EngineStopped
from omniserve.server.access.keys import ApiKey
from omniserve.server.access.limits import Caller
from omniserve.server.api import create_app
from omniserve.server.connections import ACCEPTED_AT_ONCE, Connections
from omniserve.server.embeddings.model_files import PoolingOfModel, find_pooling
from omniserve.server.embeddings.texts_model import TextsModel
from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.fields import UnknownFields
from omniserve.server.generation_defaults import GenerationDefaults, find_generation_defaults
from omniserve.server.loras import LoRAModels
from omniserve.server.options import ServerOptions
from omniserve.server.process_settings import GarbageCollector
from omniserve.server.service import Service
from omniserve.server.tokenizing.text import TextCodec

if TYPE_CHECKING:
    from omniserve.server.telemetry.otlp import OtlpTraces

# After the running requests had their time: what connections get to close.
_CLOSE_CONNECTIONS_S = 2
# Connections that wait in the kernel to be accepted.
BACKLOG = 2048


async def texts_of(
    options: ServerOptions, info: EngineInfo, tokenizer: Any
) -> tuple[TextCodec, GenerationDefaults, PoolingOfModel]:
    """Return what reads and writes a model's texts, what its files say of sampling, and of pooling.

    Raises:
        EngineStopped: An option does not fit the model; the message says which.
    """
    try:
        codec = TextCodec(
            tokenizer,
            options.chat_template,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )
    except ValueError as error:
        raise EngineStopped(str(error)) from None
    await codec.look_at_templates()
    bounded = [spec.name for spec in info.classes if spec.thinking_token_budget is not None]
    if bounded and not codec.thinks:
        raise EngineStopped(
            f"--class {bounded[0]} has a thinking budget, but it is not known here how this model marks its reasoning; "
            "remove thinking= from it, or name the model's --reasoning-parser"
        )
    try:
        defaults = await asyncio.to_thread(find_generation_defaults, options.generation_config, options.tokenizer)
    except (OSError, ValueError) as error:
        raise EngineStopped(f"--generation-config {options.generation_config}: {error}") from None
    return codec, defaults, await asyncio.to_thread(find_pooling, options.tokenizer)


def service_of(
    options: ServerOptions,
    *,
    engine: Fleet,
    info: EngineInfo,
    codec: TextCodec,
    defaults: GenerationDefaults,
    loras: LoRAModels,
    pooling: PoolingOfModel,
    second: TextsModel | None,
) -> Service:
    """Return the service that options ask for, of parts that were loaded."""
    keys = options.keys.keys if options.keys is not None else ()
    return Service(
        engine=engine,
        info=info,
        codec=codec,
        model_names=options.model_names,
        limits=options.limits,
        private_callers=frozenset(key.name for key in keys if key.private_prefixes),
        weights={key.name: key.weight for key in keys},
        unknown_fields=UnknownFields(refuse=options.unknown_fields == "refuse"),
        defaults=defaults,
        loras=loras,
        pooling=pooling,
        second=second,
        drops_billing_header=options.drop_billing_header,
    )


def application(
    options: ServerOptions,
    service: Service,
    *,
    traces: OtlpTraces | None,
    routers: Sequence[APIRouter] = (),
    caller: Callable[[ApiKey], Caller] = Caller,
) -> ASGIApp:
    """Return the ASGI application that options ask for; the other arguments are those of ``create_app``."""
    return create_app(
        service,
        routers=routers,
        keys=options.keys,
        guard_all=options.guard_all,
        cors_origins=options.cors_origins,
        host=options.host,
        root_path=options.root_path,
        traces=traces,
        caller=caller,
    )


class HttpServer(uvicorn.Server):
    """Serves an application, and leaves signals to others: uvicorn would cut connections, and requests shall finish.

    Args:
        app: The application.
        options: What they say of addresses and times.
        connections: Those of this process.
        service: What is served.
        is_public: Clients connect to it: with TLS, if asked for, and with the server's own headers.
    """

    def __init__(
        self, app: ASGIApp, options: ServerOptions, connections: Connections, service: Service, *, is_public: bool
    ) -> None:
        config = uvicorn.Config(
            app,
            http=connections.protocol,  # type: ignore[arg-type]  # a class, it says, but it only calls it
            ssl_certfile=options.ssl_certfile if is_public else None,
            ssl_keyfile=options.ssl_keyfile if is_public else None,
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            ws="none",
            server_header=is_public,
            date_header=is_public,
            timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
            # Longer than clients keep an idle connection (5 s): one that both sides close costs a request.
            timeout_keep_alive=math.ceil(options.limits.stall_timeout_s),
            backlog=ACCEPTED_AT_ONCE,  # asyncio accepts as many in a row
        )
        super().__init__(config)
        self._connections = connections
        self._collector = GarbageCollector()
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # which uvicorn made as short as what is accepted at once

    async def on_tick(self, counter: int) -> bool:
        """Close idle connections and collect garbage; uvicorn calls this each tenth of a second."""
        self._connections.close_idle()
        self._collector.collect(is_idle=self._service.is_idle)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_unused(host: str, port: int) -> None:
    """See that nobody listens on a port, which several processes of this server are to share.

    Raises:
        OSError: Somebody does: connections would be divided between them and this server.
    """
    _bound(host, port).close()


def listen(host: str, port: int, stall_timeout_s: float, *, is_shared: bool) -> socket.socket:
    """Bind now, so that a port in use is known before a model is loaded; uvicorn listens when all is ready.

    ``is_shared``: other processes of the server bind the port, too. Connections go to those of them that listen.
    """
    listener = _bound(host, port, is_shared=is_shared)
    # Connections inherit it: the kernel cuts one off if its peer takes nothing for so long of what is sent to it, also
    # where this process has long written the last byte and closed its side.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(stall_timeout_s * 1000))
    return listener


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sets TCP_NODELAY on such sockets only, and without it an answer waits 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound

"""Start the engine process and the HTTP server, run, stop both in order."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from omniserve.core.errors import EngineStopped
from omniserve.core.logs import set_up_logs
from omniserve.launch.models import load_tokenizer
from omniserve.routing.routers import ROUTERS
from omniserve.server.access.limits import Caller
from omniserve.server.access.origins import is_loopback
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.routes import BatchServing
from omniserve.server.connections import Connections, allow_connections
from omniserve.server.dashboard.serving import Dashboard
from omniserve.server.embeddings.texts_model import start_second
from omniserve.server.engines import admin
from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.local import starter
from omniserve.server.engines.process import EngineLike, EngineMaker
from omniserve.server.engines.remote import RemoteSource
from omniserve.server.engines.sources import EngineSource, LocalSource, Places
from omniserve.server.errors import ApiError
from omniserve.server.http_process import BACKLOG, HttpServer, application, check_unused, listen, service_of, texts_of
from omniserve.server.loras import LoRAModels
from omniserve.server.options import ServerOptions
from omniserve.server.responses.store import ResponseStore
from omniserve.server.service import Service
from omniserve.server.telemetry.traces import open_traces

if TYPE_CHECKING:
    from omniserve.server.workers.pool import WorkerPool

logger = logging.getLogger("omniserve.server")


def run(options: ServerOptions, make_engine: EngineFactory) -> int:
    """Serve until a signal comes; return the exit status.

    0 after SIGTERM or SIGINT, 1 when the engine could not start, or died more often than it is started again.
    """
    set_up_logs(options.log_level, options.log_format, text="%(levelname)s %(message)s")
    try:
        max_connections = allow_connections(options.limits.max_connections)
    except ValueError as error:
        logger.error("cannot start: %s", error)
        return 1
    connections = Connections(max_connections, options.limits.stall_timeout_s)
    try:
        main = _Main(options, make_engine, connections)
    except ValueError as error:
        logger.error("cannot start: %s", error)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main.run())


async def start_service(engine: Fleet, options: ServerOptions) -> Service:
    """Start the engine, and then that of the second model, if there is one; return its service.

    Raises:
        EngineStopped: Engine or tokenizer could not be loaded; the message says why.
    """
    started_s = time.monotonic()
    # Both take seconds, so at the same time.
    tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, options.tokenizer, options.trust_remote_code))
    try:
        info = await engine.start()
    finally:
        # If the engine failed, so did this, probably; the engine's message is the one to show.
        await asyncio.gather(tokenizer, return_exceptions=True)
    try:
        loaded = tokenizer.result()
    except (OSError, ValueError, ImportError) as error:
        raise EngineStopped(f"no tokenizer in {options.tokenizer}: {error}") from None
    codec, defaults, pooling = await texts_of(options, info, loaded)
    loras = LoRAModels(options.model_names, options.lora_dirs)
    engine.on_restart = functools.partial(loras.restore, engine)
    try:
        for name, folder in options.loras.items():
            await loras.load(engine, name, folder)
    except ApiError as error:
        raise EngineStopped(f"--lora-modules: {error.message}") from None
    logger.info("engine: ready after %.1f s", time.monotonic() - started_s)
    second = None
    if options.embedding_model is not None:
        second = await start_second(
            options.embedding_model,
            classes=info.classes,
            make_fleet=lambda maker: _fleet(options, [_local_source(options, 0, maker)]),
        )
    return service_of(
        options, engine=engine, info=info, codec=codec, defaults=defaults, loras=loras, pooling=pooling, second=second
    )


class EngineFactory(Protocol):
    """Makes the engine of a server, or one of several."""

    def __call__(self, progress: Callable[[str], None]) -> EngineLike: ...
    def for_replica(self, number: int, count: int) -> EngineMaker:
        """Return the maker of engine ``number`` of ``count``, with its share of the machine."""


def fleet_of(options: ServerOptions, make_engine: EngineFactory) -> Fleet:
    """Return the engines of a server, not started."""
    return _fleet(options, _sources(options, make_engine))


def _sources(options: ServerOptions, make_engine: EngineFactory) -> list[EngineSource]:
    """Return where the engines of a server are from; those of this machine are its shares.

    Raises:
        ValueError: Ray cannot place them.
    """
    if options.ray_address is None:
        return [*_local_sources(options, make_engine), *_remote_sources(options)]
    from omniserve.server.engines.on_ray import place_engines

    placed = place_engines(
        options.ray_address,
        [make_engine] * options.replicas,
        num_ranks=options.num_ranks,
        heartbeat_s=options.limits.engine_heartbeat_s,
        max_restarts=options.limits.engine_restarts,
        log_level=options.log_level,
        log_format=options.log_format,
    )
    return [*placed, *_remote_sources(options)]


def _local_sources(options: ServerOptions, make_engine: EngineFactory) -> list[EngineSource]:
    """Return the shares of this machine."""
    count = options.replicas
    makers: list[EngineMaker] = [make_engine]
    if count != 1:
        makers = [make_engine.for_replica(number, count) for number in range(count)]
    return [_local_source(options, number, maker) for number, maker in enumerate(makers)]


def _remote_sources(options: ServerOptions) -> list[EngineSource]:
    """Return the engines on other machines that are used from the start on."""
    if options.engines is None:
        return []
    return [RemoteSource(address, options.engines.keys) for address in options.engines.addresses]


def _local_source(options: ServerOptions, number: int, maker: EngineMaker) -> LocalSource:
    return LocalSource(f"local:{number}", starter(maker, options.log_level, options.log_format))


def _fleet(options: ServerOptions, sources: Sequence[EngineSource]) -> Fleet:
    return Fleet(
        sources,
        ROUTERS[options.router](),
        max_restarts=options.limits.engine_restarts,
        heartbeat_s=options.limits.engine_heartbeat_s,
        on_progress=lambda text: logger.info("engine: %s", text),
    )


class _Main:
    """The life of a server: start, main loop, stop."""

    def __init__(self, options: ServerOptions, make_engine: EngineFactory, connections: Connections) -> None:
        self._options = options
        self._connections = connections
        sources = _sources(options, make_engine)
        self._engine = _fleet(options, sources)
        self._places = Places([source for source in sources if source.is_local], options.engines)
        self._fleets = [self._engine]
        """The engine, or engines, and that of the second model if there is one."""
        self._batches = BatchServing(options.batches)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if self._options.api_processes > 1:
                check_unused(self._options.host, self._options.port)
            listener = listen(
                self._options.host,
                self._options.port,
                self._options.limits.stall_timeout_s,
                is_shared=self._options.api_processes > 1,
            )
        except OSError as error:
            logger.error("cannot listen on %s:%d: %s", self._options.host, self._options.port, error.strerror)
            return 1
        if self._options.keys is None and not is_loopback(self._options.host):
            logger.warning(
                "%s can be reached from elsewhere, and there are no API keys: give --api-key-file, or --host 127.0.0.1",
                self._options.host,
            )
        try:
            await self._batches.open()
        except StorageError as error:
            logger.error("cannot start: %s", error)
            listener.close()
            return 1
        with listener:
            starting = asyncio.create_task(start_service(self._engine, self._options))
            await _first_of(starting, self._stop.wait())
            try:
                if not starting.done():
                    logger.info("stopped before it was ready")
                    return 0
                service = starting.result()
                if service.second is not None:
                    self._fleets.append(service.second.engine)
                return await self._serve(service, listener)
            except EngineStopped as error:
                logger.error("cannot start: %s", error)
                return 1
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                await asyncio.gather(*(engine.close() for engine in self._fleets))

    async def _serve(self, service: Service, listener: socket.socket) -> int:
        dashboard = Dashboard()
        days, database = self._options.limits.response_days, self._batches.database
        if database is not None and days:
            service.responses = ResponseStore(database, ttl_s=days * 86400)
        traces = open_traces(self._options.otlp_endpoint, model_name=service.model_name)
        keys = () if self._options.keys is None else self._options.keys.keys
        callers = {key.name: Caller(key) for key in keys}
        app = application(
            self._options,
            service,
            routers=[
                self._batches.start(service),
                dashboard.start(service),
                admin.router(self._engine, self._places, service.bodies, service.unknown_fields),
            ],
            traces=traces,
            caller=lambda key: callers[key.name],
        )
        pool, public = None, listener
        if self._options.api_processes > 1:
            from omniserve.server.workers.pool import WorkerPool
            from omniserve.server.workers.process import settings_of

            pool = WorkerPool(
                service,
                settings_of(self._options, service, listener.getsockname()[1]),
                callers,
                self._options.api_processes,
            )
            listener = pool.listen()
        server = HttpServer(app, self._options, self._connections, service, is_public=pool is None)
        listener.listen(BACKLOG)  # now, so that a program that reads the next line can connect
        serving = asyncio.create_task(server.serve([listener]))
        host, port = public.getsockname()[:2]
        failure = None if pool is None else await self._start_workers(pool, host, port)
        if failure is None and not self._stop.is_set():
            scheme, path = "http" if self._options.ssl_certfile is None else "https", self._options.root_path
            logger.info("serving %s on %s://%s:%d%s/v1", service.model_name, scheme, host, port, path)
            await _first_of(serving, self._stop.wait(), self._engine.stopped.wait())
        if failure is not None:
            logger.error("cannot start: %s", failure)
        elif self._engine.stopped.is_set():
            logger.error("the engine has stopped: %s", self._engine.failure)
        else:
            logger.info("stopping: running requests have %g s", self._options.limits.shutdown_timeout_s)
        for engine in self._fleets:
            engine.keep_down()
        draining = asyncio.create_task(service.drain(self._options.limits.shutdown_timeout_s))
        if pool is not None:
            await pool.drain(self._options.limits.shutdown_timeout_s)
        await self._batches.stop()
        await draining  # at once without an engine: every call got its error
        await dashboard.stop()
        if pool is not None:
            await pool.close()
        server.should_exit = True
        await serving
        if service.responses is not None:
            service.responses.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
        return 0 if failure is None and self._engine.failure is None else 1

    async def _start_workers(self, pool: WorkerPool, host: str, port: int) -> str | None:
        """Start the API workers, unless the server is to stop meanwhile; return why they cannot start, if so."""
        try:
            check_unused(host, port)  # again: loading the model took its time
        except OSError as error:
            return f"cannot listen on {host}:{port}: {error.strerror}"
        starting = asyncio.create_task(pool.start())
        await _first_of(starting, self._stop.wait(), self._engine.stopped.wait())
        starting.cancel()
        (outcome,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(outcome, EngineStopped):
            return str(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return None

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            logger.warning("second signal: stopping at once")
            for engine in self._fleets:
                engine.kill()
            os._exit(128 + number)
        self._stop.set()


async def _first_of(*awaitables: Any) -> None:
    """Wait for the first to end; then cancel the other coroutines, but no tasks."""
    futures = [asyncio.ensure_future(item) for item in awaitables]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for item, future in zip(awaitables, futures, strict=True):
        if item is not future:
            future.cancel()

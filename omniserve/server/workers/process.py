"""An API worker: a process that accepts connections of the server's port, and does HTTP and text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import uvloop
import zmq

from omniserve.core.errors import EngineStopped
from omniserve.core.logs import set_up_logs
from omniserve.launch.models import load_tokenizer
from omniserve.server.connections import Connections, allow_connections
from omniserve.server.embeddings.model_files import PoolingOfModel
from omniserve.server.embeddings.texts_model import TextsModel
from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.messages import Close, EngineInfo, Refused, Step
from omniserve.server.http_process import BACKLOG, HttpServer, application, listen, service_of, texts_of
from omniserve.server.loras import LoRAModels
from omniserve.server.options import ServerOptions
from omniserve.server.service import Service
from omniserve.server.telemetry.traces import open_traces
from omniserve.server.workers.forwarding import OWN_PATHS, TEXTS_PATHS, Forwarding
from omniserve.server.workers.links import Link
from omniserve.server.workers.messages import (
    Admitted,
    AskCounts,
    Counted,
    Denied,
    Drain,
    Drained,
    Failed,
    Gone,
    Hello,
    Ready,
    State,
    decode_to_worker,
    encode,
)
from omniserve.server.workers.remote import RemoteCallers, RemoteFleet

logger = logging.getLogger("omniserve.server")

PROCESS_NAME = "omniserve-api"
"""The name of workers' processes, as ps shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What all workers of a server are made of."""

    options: ServerOptions
    """With each worker's share of the connections, and the port that was taken."""
    info: EngineInfo
    second: tuple[str, PoolingOfModel] | None
    """The second model's name and use, which the owner serves; None: there is none."""


def settings_of(options: ServerOptions, service: Service, port: int) -> WorkerSettings:
    """Return what the workers of a service are made of."""
    limits, most = options.limits, options.limits.max_connections
    if most is not None:
        limits = replace(limits, max_connections=-(-most // options.api_processes))
    second = None if service.second is None else (service.second.name, service.second.pooling)
    return WorkerSettings(options=replace(options, port=port, limits=limits), info=service.info, second=second)


def run_worker(settings: WorkerSettings, incoming: str, outgoing: str, owner_path: str) -> None:
    """Run a worker until its owner tells it to end, or is gone.

    Args:
        settings: What it is made of.
        incoming, outgoing: Addresses of the owner's messages, and of those to it.
        owner_path: Path of the Unix socket on which the owner's application answers.
    """
    # Ctrl-C reaches the whole process group; the owner decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # where there is no such file, ps shows what it shows
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    options = settings.options
    set_up_logs(options.log_level, options.log_format, text="%(levelname)s %(message)s")
    for name in ("httpx", "httpcore"):  # the owner's log has what was handed on
        logging.getLogger(name).setLevel(logging.WARNING)
    threading.Thread(target=_exit_with_owner, name="owner-watch", daemon=True).start()
    status = 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(_Worker(settings, incoming, outgoing, owner_path).run())
    except Exception:
        logger.exception("an API process failed")
    finally:
        logging.shutdown()
        os._exit(status)  # without taking the interpreter apart: everything is closed


class _Worker:
    """The life of a worker."""

    def __init__(self, settings: WorkerSettings, incoming: str, outgoing: str, owner_path: str) -> None:
        self._settings, self._addresses, self._owner_path = settings, (incoming, outgoing), owner_path
        self._options = settings.options
        self._stop, self._knows_state = asyncio.Event(), asyncio.Event()
        self._service: Service | None = None
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve; return the exit status."""
        context = zmq.Context()
        self._link = link = Link(context, *self._addresses, binds=False, take=self._take)
        self._fleet, self._callers = RemoteFleet(link.send), RemoteCallers(link.send)
        self._loras = LoRAModels(self._options.model_names)
        link.send(encode(Hello()))
        try:
            await self._serve()
            return 0
        except (EngineStopped, OSError, ValueError) as error:
            link.send(encode(Failed(str(error))))
            await asyncio.sleep(0.1)  # for the message to leave
            return 1
        finally:
            link.close()
            context.destroy(linger=500)

    async def _serve(self) -> None:
        options, info = self._options, self._settings.info
        most = allow_connections(options.limits.max_connections, files_each=2)  # one to the owner if a call is its own
        connections = Connections(most, options.limits.stall_timeout_s)
        tokenizer = await asyncio.to_thread(load_tokenizer, options.tokenizer, options.trust_remote_code)
        codec, defaults, pooling = await texts_of(options, info, tokenizer)
        engine, second = cast(Fleet, self._fleet), None  # it has all that is used of one here
        if self._settings.second is not None:
            name, use = self._settings.second
            second = TextsModel(name=name, engine=engine, info=info, codec=codec, pooling=use)
        service = self._service = service_of(
            options,
            engine=engine,
            info=info,
            codec=codec,
            defaults=defaults,
            loras=self._loras,
            pooling=pooling,
            second=second,
        )
        traces = open_traces(options.otlp_endpoint, model_name=service.model_name)
        own = application(options, service, traces=traces, caller=self._callers.caller)
        own_paths = OWN_PATHS if second is not None else OWN_PATHS | TEXTS_PATHS
        app = Forwarding(own, self._owner_path, options.root_path, own_paths)
        await self._knows_state.wait()
        with listen(options.host, options.port, options.limits.stall_timeout_s, is_shared=True) as listener:
            server = HttpServer(app, options, connections, service, is_public=True)
            listener.listen(BACKLOG)
            serving = asyncio.create_task(server.serve([listener]))
            self._link.send(encode(Ready()))
            await self._stop.wait()
            server.should_exit = True
            await serving
        await app.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    def _take(self, data: bytes) -> None:
        message = decode_to_worker(data)
        match message:
            case Step() | Refused() | Denied() | Gone():
                self._fleet.take(message)
            case Admitted():
                self._callers.take(message)
            case State():
                self._fleet.state, self._loras.served = message, message.loras
                self._knows_state.set()
            case AskCounts():
                assert self._service is not None
                self._link.send(encode(Counted(self._service.metrics.take_counts())))
            case Drain(timeout_s):
                self._draining = asyncio.create_task(self._drain(timeout_s))
            case Close():
                self._stop.set()

    async def _drain(self, timeout_s: float) -> None:
        if self._service is not None:
            await self._service.drain(timeout_s)
        self._link.send(encode(Drained()))


def _exit_with_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    os._exit(1)

"""Fleet: the engines of one server, each in a process of its own, and which of them a call goes to.

A call's requests go to one engine. If that refuses them for its load, or dies before the first token, the next engine
is tried; the order is the router's (``omniserve/routing``). After two deaths a call gets its error.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from omniserve.core.errors import EngineStopped, RequestRejected
from omniserve.core.load import EngineLoad
from omniserve.core.stats import EngineStats, FreedKV, total
from omniserve.routing.books import Call, EngineBooks, Sent
from omniserve.routing.routers import Router
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.engines.process import EngineMaker
from omniserve.server.engines.supervisor import EngineSupervisor
from omniserve.server.errors import ApiError, engine_gone


class Fleet:
    """Some engines of the same model with the same settings.

    Args:
        make_engines: Makes each engine; their number is that of the engines.
        router: Chooses among them.
        log_level, log_format, max_restarts: As ``EngineSupervisor`` takes them.
        on_progress: Told how starts go on.
    """

    def __init__(
        self,
        make_engines: Sequence[EngineMaker],
        router: Router,
        *,
        log_level: str = "warning",
        log_format: str = "text",
        max_restarts: int = 3,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        count = len(make_engines)
        self._router = router
        self._books = [EngineBooks(number) for number in range(count)]
        self.engines = [
            EngineSupervisor(
                make_engine,
                log_level=log_level,
                log_format=log_format,
                max_restarts=max_restarts,
                on_progress=on_progress if count == 1 else functools.partial(_tell, on_progress, number),
                on_load=None if count == 1 else functools.partial(self._hear, number),
                on_death=self._books[number].forget,
            )
            for number, make_engine in enumerate(make_engines)
        ]
        self.on_restart: Callable[[EngineClient], Awaitable[None]] | None = None
        """Called with an engine that was started again, before it takes requests."""
        self.stopped = asyncio.Event()
        """Set when all engines are dead for good."""
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> EngineInfo:
        """Start the engines; return when all are ready.

        The first one starts alone: what it measures and compiles is there for the others then.

        Raises:
            EngineStopped: One could not start; the message says why.
        """
        info = await self.engines[0].start()
        if len(self.engines) > 1:
            await asyncio.gather(*(engine.start() for engine in self.engines[1:]))
        tokens = info.limits.pool_tokens or info.limits.max_tokens
        for books, engine in zip(self._books, self.engines, strict=True):
            books.have_cache(tokens)
            engine.on_restart = self._restarted
            self._watching.append(asyncio.create_task(self._watch(engine)))
        return info

    @property
    def clients(self) -> list[EngineClient]:
        """The engine processes that take requests."""
        return [engine.client for engine in self.engines if engine.client.failure is None]

    @property
    def replicas(self) -> list[tuple[bool, EngineBooks]]:
        """For each engine a truth value, True while it takes requests, and its books; empty if there is one engine."""
        if len(self.engines) == 1:
            return []
        return [(_is_open(engine), books) for engine, books in zip(self.engines, self._books, strict=True)]

    @property
    def failure(self) -> str | None:
        """The reason why no engine takes requests now; None while one does."""
        return None if self.clients else next(engine.failure for engine in self.engines)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until the first engine is expected back; None if all are dead for good."""
        return min((s for engine in self.engines if (s := engine.retry_after_s) is not None), default=None)

    @property
    def num_restarts(self) -> int:
        """Engines that were ready again after a death."""
        return sum(engine.num_restarts for engine in self.engines)

    def check_room(self) -> None:
        """Raise ApiError unless an engine takes requests.

        Raises:
            ApiError: None is there, or too much waits for each of them.
        """
        clients = self.clients
        if not clients:
            raise engine_gone(self.failure or "the engine has stopped", self.retry_after_s)
        refusals: list[ApiError] = []
        for client in clients:
            try:
                client.check_room()
                return
            except ApiError as error:
                refusals.append(error)
        raise refusals[0]

    def has_lora(self, name: str) -> bool:
        """Return whether an engine has a LoRA adapter that was loaded in all."""
        return any(name not in client.refused_loras for client in self.clients)

    def place(self, call: Call, *, lora: str | None = None) -> Placement:
        """Return where a call's requests go, for a LoRA adapter, if they are, to the engines that have it.

        Raises:
            ApiError: No such engine takes requests.
        """
        if (failure := self.failure) is not None:
            raise engine_gone(failure, self.retry_after_s)
        if len(self.engines) == 1:
            return Placement(call, [(self.engines[0], None)])
        open_books = [
            books
            for (is_open, books), engine in zip(self.replicas, self.engines, strict=True)
            if is_open and lora not in engine.client.refused_loras
        ]
        if not open_books:
            raise engine_gone(f"no engine is ready that has the LoRA adapter {lora!r}", self.retry_after_s)
        order = self._router.order(call, open_books)
        return Placement(call, [(self.engines[books.number], books) for books in order])

    async def change_lora(self, name: str, folder: str | None) -> None:
        """Have each engine load a LoRA adapter from a folder, or unload it if that is None.

        An engine that dies meanwhile gets the adapters when it is started again.

        Raises:
            ApiError: One refuses, and then none has loaded it; or none is there.
        """
        clients = self.clients
        if not clients:
            raise engine_gone(self.failure or "the engine has stopped", None)
        changes = (client.change_lora(name, folder) for client in clients)
        results = await asyncio.gather(*changes, return_exceptions=True)
        errors = [each for each in results if isinstance(each, BaseException)]
        refusals = [each for each in errors if not isinstance(each, ApiError) or each.status == HTTPStatus.BAD_REQUEST]
        if refusals and folder is not None:
            took = [client for client, result in zip(clients, results, strict=True) if result is None]
            await asyncio.gather(*(client.change_lora(name, None) for client in took), return_exceptions=True)
            raise refusals[0]
        if len(errors) == len(clients):
            raise errors[0]

    async def clear_cache(self, sessions: list[str] | None) -> FreedKV:
        """Have each engine free its prefix cache, or what only these sessions use; return what was freed in all.

        Raises:
            ApiError: No engine is there.
        """
        clients = self.clients
        if not clients:
            raise engine_gone(self.failure or "the engine has stopped", None)
        found = await asyncio.gather(*(client.clear_cache(sessions) for client in clients), return_exceptions=True)
        for books in self._books:
            books.forget_prompts()
        freed = [each for each in found if isinstance(each, FreedKV)]
        if not freed:
            raise next(each for each in found if isinstance(each, BaseException))
        return FreedKV(
            device=sum(each.device for each in freed),
            host=sum(each.host for each in freed),
            disk=sum(each.disk for each in freed),
            block_size=freed[0].block_size,
        )

    async def stats(self) -> EngineStats:
        """Return the statistics of all engines as one.

        Raises:
            EngineStopped: There is none.
            TimeoutError: One does not answer in time.
        """
        clients = self.clients
        if not clients:
            raise EngineStopped(self.failure or "the engine has stopped")
        found = await asyncio.gather(*(client.stats() for client in clients), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, EngineStopped):
                raise each
        living = [each for each in found if isinstance(each, EngineStats)]
        if not living:
            raise EngineStopped(self.failure or "the engine has stopped")
        return living[0] if len(living) == 1 else total(living)

    def keep_down(self) -> None:
        """Start no engine from now on: the server is about to stop."""
        for engine in self.engines:
            engine.keep_down()

    def kill(self) -> None:
        """End the processes at once."""
        for engine in self.engines:
            engine.kill()

    async def close(self) -> None:
        """End the processes; requests that still run get EngineStopped."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _hear(self, number: int, load: EngineLoad) -> None:
        self._books[number].hear(load, time.monotonic())

    async def _restarted(self, client: EngineClient) -> None:
        if self.on_restart is not None:
            await self.on_restart(client)

    async def _watch(self, engine: EngineSupervisor) -> None:
        await engine.stopped.wait()
        if all(each.stopped.is_set() for each in self.engines):
            self.stopped.set()


class Placement:
    """The engine that has a call, and those that are tried after it.

    Args:
        call: What the router knows of the call.
        order: The engines to try, the first of which takes requests, each with its books if they are kept.
    """

    def __init__(self, call: Call, order: Sequence[tuple[EngineSupervisor, EngineBooks | None]]) -> None:
        self._call = call
        self._left = list(reversed(order))
        self._refusals: list[RequestRejected] = []
        self._has_seen_death = False
        self._sent: tuple[EngineBooks, Sent] | None = None
        self._take(*self._left.pop())

    def move_on(self, error: Exception) -> bool:
        """Choose the next engine, as the present one has refused the call or died; return whether there is one."""
        if isinstance(error, RequestRejected):
            self._refusals.append(error)
        elif isinstance(error, EngineStopped) and not self._has_seen_death:
            self._has_seen_death = True  # it may be the call that kills them: two deaths are enough
        else:
            return False
        while self._left:
            engine, books = self._left.pop()
            if _is_open(engine):
                self.end()
                self._take(engine, books)
                return True
        return False

    def note_sent(self) -> None:
        """Note that the call's requests were sent to the engine."""
        if self._sent is not None:
            books, sent = self._sent
            books.send(self._call, sent)

    def last_error(self, error: Exception) -> Exception:
        """Return the error to answer with if the last engine gave this one: of refusals the soonest to try again."""
        hinted = [each for each in self._refusals if each.retry_after_s is not None]
        return min(hinted, key=lambda each: each.retry_after_s or 0.0) if hinted else error

    def end(self) -> None:
        """Note that the call has ended. Calling it again does nothing."""
        if self._sent is not None:
            books, sent = self._sent
            books.end(sent)
            self._sent = None

    def _take(self, engine: EngineSupervisor, books: EngineBooks | None) -> None:
        self.client = engine.client
        """The engine process that has the call, or is to get it."""
        if books is not None:
            self._sent = books, books.expect(self._call)


def _is_open(engine: EngineSupervisor) -> bool:
    return engine.client.failure is None


def _tell(on_progress: Callable[[str], None], number: int, text: str) -> None:
    on_progress(f"{number}: {text}")

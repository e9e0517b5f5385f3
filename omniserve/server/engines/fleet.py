"""Fleet: the engines of one server, each in a process of its own, and which of them a call goes to.

A call's requests go to one engine. If that refuses them for its load, or dies before the first token, the next engine
is tried; the order is the router's (``omniserve/routing``). After two deaths a call gets its error.

Engines join and leave while requests run. One that is drained gets no more calls; one that is removed is drained first.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from omniserve.core.errors import EngineStopped
from omniserve.core.load import EngineLoad
from omniserve.core.stats import EngineStats, FreedKV, total
from omniserve.routing.books import Call, EngineBooks
from omniserve.routing.routers import Router
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.engines.placement import Member, Placement
from omniserve.server.engines.sources import EngineSource
from omniserve.server.engines.supervisor import EngineSupervisor
from omniserve.server.errors import ApiError, EngineRemoved, engine_gone

logger = logging.getLogger(__name__)

# It is looked so often whether an engine that is drained has ended its requests.
_LOOK_S = 0.05
# The longest pause between two attempts to find an engine of another machine.
_SEEK_S = 5.0


class Fleet:
    """Some engines of the same model with the same settings.

    What serves calls uses ``start``, ``place``, ``check_room``, ``stats``, ``change_lora``, ``clear_cache``, the
    properties and ``close``. The routes of ``/admin/engines`` use ``add``, ``drain``, ``resume`` and ``remove``.

    Args:
        sources: Where the engines are from.
        router: Chooses among them.
        max_restarts: As ``EngineSupervisor`` takes it, for engines of this machine. Those of others are looked for
            without end.
        heartbeat_s: As ``EngineClient`` takes it.
        on_progress: Told how starts go on.
    """

    def __init__(
        self,
        sources: Sequence[EngineSource],
        router: Router,
        *,
        max_restarts: int = 3,
        heartbeat_s: float = 20.0,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._router = router
        self._max_restarts, self._heartbeat_s, self._on_progress = max_restarts, heartbeat_s, on_progress
        self._is_plural = len(sources) > 1
        """Books are kept; True from the second engine on."""
        self._num_ever = 0
        self._info: EngineInfo | None = None
        self.members: list[Member] = []
        """The engines, those that are not there now among them."""
        for source in sources:
            self._make_member(source)
        self.on_restart: Callable[[EngineClient], Awaitable[None]] | None = None
        """Called with an engine that was started again or has joined, before it takes requests."""
        self.stopped = asyncio.Event()
        """Set when all engines are dead for good."""
        self._watching: dict[Member, asyncio.Task[None]] = {}

    def _make_member(self, source: EngineSource) -> Member:
        number = self._num_ever
        self._num_ever += 1
        books = EngineBooks(number)
        engine = EngineSupervisor(
            functools.partial(self._new_client, source, books),
            name="the engine" if source.is_local and not self._is_plural else f"engine {number} ({source.name})",
            max_restarts=self._max_restarts if source.is_local else math.inf,
            **({} if source.is_local else {"longest_pause_s": _SEEK_S}),
            on_progress=functools.partial(self._tell, number),
            on_death=books.forget,
            check=functools.partial(self._check, books),
        )
        member = Member(source, engine, books)
        self.members.append(member)
        return member

    def _new_client(self, source: EngineSource, books: EngineBooks) -> EngineClient:
        on_load = functools.partial(_hear, books) if self._is_plural else None
        return EngineClient(source.connect, on_load=on_load, heartbeat_s=self._heartbeat_s)

    def _tell(self, number: int, text: str) -> None:
        self._on_progress(f"{number}: {text}" if self._is_plural else text)

    def _check(self, books: EngineBooks, info: EngineInfo) -> None:
        """Take an engine's word on what it is.

        Raises:
            EngineStopped: It is not like the others.
        """
        if self._info is None:
            self._info = info
        for what, own, others in (
            ("model (--model, --max-model-len)", _model_of(info), _model_of(self._info)),
            ("classes (--class)", info.classes, self._info.classes),
        ):
            if own != others:
                raise EngineStopped(f"its {what} is not that of the other engines: {own}, not {others}")
        books.have_cache(info.limits.pool_tokens or info.limits.max_tokens)

    async def start(self) -> EngineInfo:
        """Start the engines; return when those of this machine are ready, or the first one of others if none is here.

        The first one starts alone: what it measures and compiles is there for the others then.

        Raises:
            EngineStopped: One could not start; the message says why.
        """
        local = [member for member in self.members if member.source.is_local]
        if local:
            await local[0].engine.start()
            await asyncio.gather(*(member.engine.start() for member in local[1:]))
        seeking = [member for member in self.members if not member.source.is_local]
        for member in self.members:
            member.engine.on_restart = self._restarted
            self._watching[member] = asyncio.create_task(self._watch(member))
        for member in seeking:
            member.engine.begin()
        if not local:
            ready = [asyncio.create_task(member.engine.ready.wait()) for member in seeking]
            try:
                await asyncio.wait(ready, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in ready:
                    task.cancel()
        assert self._info is not None
        return self._info

    def add(self, source: EngineSource) -> Member:
        """Have an engine join; it gets calls when it is ready."""
        if not self._is_plural:
            self._is_plural = True
            for member in self.members:
                member.engine.hear_load(functools.partial(_hear, member.books))
        member = self._make_member(source)
        member.engine.on_restart = self._restarted
        member.engine.begin()
        self._watching[member] = asyncio.create_task(self._watch(member))
        return member

    def member(self, number: int) -> Member:
        """Return the engine of a number.

        Raises:
            ApiError: There is none.
        """
        for member in self.members:
            if member.number == number:
                return member
        known = ", ".join(str(member.number) for member in self.members)
        raise ApiError(f"there is no engine {number}; there are {known}", status=404, param="id", code="not_found")

    def drain(self, number: int) -> Member:
        """Give an engine no more calls; those that it has go on.

        Raises:
            ApiError: There is no such engine, or no other that takes calls.
        """
        member = self.member(number)
        self._check_others(member)
        member.is_draining = True
        return member

    def resume(self, number: int) -> Member:
        """Give an engine that was drained calls again.

        Raises:
            ApiError: There is no such engine, or it is being removed.
        """
        member = self.member(number)
        if member.leaving is not None:
            raise ApiError(f"engine {number} is being removed; add another one", status=409, code="engine_removed")
        member.is_draining = False
        return member

    def remove(self, number: int, timeout_s: float) -> Member:
        """Drain an engine and end it when it has no more requests, at the latest after ``timeout_s`` seconds.

        Requests that have no token by then are tried on other engines, others get an error; lines of batches are run
        again.

        Raises:
            ApiError: As ``drain`` does.
        """
        member = self.drain(number)
        if member.leaving is None:
            member.leaving = asyncio.create_task(self._remove(member, timeout_s))
            member.leaving.add_done_callback(_tell_of_bug)
        return member

    def _check_others(self, member: Member) -> None:
        if not any(each.is_open for each in self.members if each is not member):
            raise ApiError(
                f"no engine but {member.number} takes calls: add one, or stop the server",
                status=409,
                code="last_engine",
            )

    async def _remove(self, member: Member, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        member.engine.keep_down()
        while member.engine.client.num_requests and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        member.engine.client.end_requests(EngineRemoved(f"engine {member.number} was removed"))
        try:
            await member.engine.close()
            await member.source.end()
        finally:
            self.members.remove(member)
            self._watching.pop(member).cancel()
            self._note_stopped()

    @property
    def engines(self) -> list[EngineSupervisor]:
        """The engines that take calls, or will when they are there again."""
        return [each.engine for each in self.members if each.engine.ready.is_set() and not each.is_draining]

    @property
    def clients(self) -> list[EngineClient]:
        """The engine processes that are there, those that are drained among them."""
        return [member.engine.client for member in self.members if member.is_up]

    @property
    def replicas(self) -> list[tuple[bool, EngineBooks]]:
        """For each engine a truth value, True while it takes requests, and its books; empty if there is one engine."""
        return [(member.is_open, member.books) for member in self.members] if self._is_plural else []

    @property
    def failure(self) -> str | None:
        """The reason why no engine takes requests now; None while one does."""
        return None if self._open() else next((m.engine.failure for m in self.members if not m.is_up), None)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until the first engine is expected back; None if all are dead for good."""
        return min((s for m in self.members if (s := m.engine.retry_after_s) is not None), default=None)

    @property
    def num_restarts(self) -> int:
        """Engines that were ready again after a death."""
        return sum(member.engine.num_restarts for member in self.members)

    def _open(self) -> list[Member]:
        return [member for member in self.members if member.is_open]

    def check_room(self) -> None:
        """Raise ApiError unless an engine takes requests.

        Raises:
            ApiError: None is there, or too much waits for each of them.
        """
        members = self._open()
        if not members:
            raise engine_gone(self.failure or "the engine has stopped", self.retry_after_s)
        refusals: list[ApiError] = []
        for member in members:
            try:
                member.engine.client.check_room()
                return
            except ApiError as error:
                refusals.append(error)
        raise refusals[0]

    def has_lora(self, name: str, *, beside: EngineClient) -> bool:
        """Return whether another engine has a LoRA adapter that was loaded in all, or may have it when it is back."""
        others = (member for member in self.members if member.engine.newest is not beside)
        return any(not other.is_up or name not in other.engine.client.refused_loras for other in others)

    def place(self, call: Call, *, lora: str | None = None) -> Placement:
        """Return where a call's requests go, for a LoRA adapter, if they are, to the engines that have it.

        Raises:
            ApiError: No such engine takes requests.
        """
        members = self._open()
        if not members:
            raise engine_gone(self.failure or "the engine has stopped", self.retry_after_s)
        if not self._is_plural:
            return Placement(call, [(members[0], None)])
        members = [member for member in members if lora not in member.engine.client.refused_loras]
        if not members:
            raise engine_gone(f"no engine is ready that has the LoRA adapter {lora!r}", self.retry_after_s)
        by_number = {member.number: member for member in members}
        order = self._router.order(call, [member.books for member in members])
        return Placement(call, [(by_number[books.number], books) for books in order])

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
        for member in self.members:
            member.books.forget_prompts()
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
        for member in self.members:
            member.engine.keep_down()

    def kill(self) -> None:
        """End the processes of this machine at once."""
        for member in self.members:
            if member.source.is_local:
                member.engine.kill()

    async def close(self) -> None:
        """End the processes; requests that still run get EngineStopped."""
        members = [*self.members]  # one that is leaving is ended here, too
        leaving = [member.leaving for member in members if member.leaving is not None]
        tasks = [*self._watching.values(), *leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in members))
        await asyncio.gather(*(member.source.end() for member in members))

    async def _restarted(self, client: EngineClient) -> None:
        if self.on_restart is not None:
            await self.on_restart(client)

    async def _watch(self, member: Member) -> None:
        await member.engine.stopped.wait()
        self._note_stopped()

    def _note_stopped(self) -> None:
        if all(each.engine.stopped.is_set() for each in self.members):
            self.stopped.set()


def _tell_of_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("an engine could not be removed in order", exc_info=error)


def _hear(books: EngineBooks, load: EngineLoad) -> None:
    books.hear(load, time.monotonic())


def _model_of(info: EngineInfo) -> tuple[int, int]:
    return info.limits.vocab_size, info.limits.max_model_len

"""The engine that has a call, and those that are tried after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from omniserve.core.errors import EngineStopped, RequestRejected
from omniserve.routing.books import Call, EngineBooks, Sent
from omniserve.server.engines.sources import EngineSource
from omniserve.server.engines.supervisor import EngineSupervisor


@dataclass(eq=False)
class Member:
    """An engine of a fleet."""

    source: EngineSource
    engine: EngineSupervisor
    books: EngineBooks
    is_draining: bool = False
    """True: the engine gets no more calls."""
    leaving: asyncio.Task[None] | None = None
    """Ends it when its requests have ended; None: it stays."""

    @property
    def number(self) -> int:
        """The engine's number, which no other engine of this server has had."""
        return self.books.number

    @property
    def is_up(self) -> bool:
        """The engine is there."""
        return self.engine.client.failure is None

    @property
    def is_open(self) -> bool:
        """The engine takes requests."""
        return self.is_up and not self.is_draining

    @property
    def state(self) -> str:
        """One word of ``/admin/engines``."""
        if self.leaving is not None:
            return "leaving"
        if self.is_up:
            return "draining" if self.is_draining else "up"
        return "down" if self.engine.ready.is_set() else "joining"


class Placement:
    """The engine that has a call, and those that are tried after it.

    Args:
        call: What the router knows of the call.
        order: The engines to try, the first of which takes requests, each with its books if they are kept.
    """

    def __init__(self, call: Call, order: Sequence[tuple[Member, EngineBooks | None]]) -> None:
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
            member, books = self._left.pop()
            if member.is_open:
                self.end()
                self._take(member, books)
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

    def _take(self, member: Member, books: EngineBooks | None) -> None:
        self.client = member.engine.client
        """The engine process that has the call, or is to get it."""
        if books is not None:
            self._sent = books, books.expect(self._call)


def is_tried_elsewhere(
    place: Placement, error: Exception, request_ids: Iterable[str], submit: Callable[[], object]
) -> bool:
    """Send a call's requests to the next engine, and the one after it, as one refused them or died.

    Args:
        place: The place of the call, of which no output has begun.
        error: What the present engine gave.
        request_ids: The requests, which are aborted there.
        submit: Sends them to the engine that the place has chosen.

    Returns:
        Whether an engine has them now.
    """
    while True:
        before = place.client
        if not place.move_on(error):
            return False
        for request_id in request_ids:
            before.abort(request_id)
        try:
            submit()
            return True
        except EngineStopped as stopped:
            error = stopped

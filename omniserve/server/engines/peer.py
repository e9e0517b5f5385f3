"""What an engine process is to the API process, wherever it runs: a way to send, to receive, and to end it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol


class Peer(Protocol):
    """An engine process, and the way to it."""

    reports_fd: int
    """Tells, edge-triggered, that there may be reports; all have to be received then."""
    death_fd: int
    """Readable when the process, or the way to it, is gone."""
    has_own_clock: bool
    """True of a process on another machine, whose clock differs, and which has to be told that this one lives."""

    def receive(self) -> bytes:
        """Return the next report.

        Raises:
            zmq.Again: There is none now.
        """

    def send(self, data: bytes) -> None:
        """Send a command.

        Raises:
            zmq.Again: It cannot be sent.
        """

    @property
    def is_alive(self) -> bool:
        """True until it is known to be gone."""

    def end_of(self) -> str:
        """Return why it is gone, if it said nothing itself."""

    def kill(self) -> None:
        """End the process at once."""

    async def end(self, *, is_ready: bool, has_stopped: bool) -> None:
        """End the process in order, or let go of it if it is not this server's."""

    def close(self) -> None:
        """Free what belongs to it here."""


Connect = Callable[[], Awaitable[Peer]]
"""Starts an engine process, or finds one; raises OSError, zmq.ZMQError or EngineStopped if it cannot."""

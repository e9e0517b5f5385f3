"""SideWorkQueue: the side work that the next plan starts, and a callback for the end of each piece of it."""

from __future__ import annotations

from collections.abc import Callable

from omniserve.core.work import Done, SideWork


class SideWorkQueue:
    """Collects side work for plans, and passes each ``Done`` to the callback of its piece.

    The code that begins a piece sets the callback, so no other code has to find out what a ``move_id`` is of.
    """

    def __init__(self) -> None:
        self._begun: list[SideWork] = []
        self._on_done: dict[int, Callable[[Done], None]] = {}

    def begin(self, work: SideWork) -> None:
        """Have the next plan start a piece, behind those begun before."""
        self._begun.append(work)

    def expect(self, move_id: int, on_done: Callable[[Done], None]) -> None:
        """Have ``on_done`` called when the piece of this number has ended; a later call takes the place of this one."""
        self._on_done[move_id] = on_done

    def take(self) -> tuple[SideWork, ...]:
        """Return, once, what was begun since the last call; for the plan that is decided."""
        begun, self._begun = tuple(self._begun), []
        return begun

    def finish(self, done: Done) -> None:
        """Call the callback of the piece that has ended."""
        self._on_done.pop(done.move_id)(done)

    @property
    def is_pending(self) -> bool:
        """A piece waits for the next plan."""
        return bool(self._begun)

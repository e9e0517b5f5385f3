"""Upkeep: the contract of what is done on an engine beside its requests, until it is done."""

from __future__ import annotations

from typing import Protocol


class Others(Protocol):
    """Work that upkeep gives way to, again and again."""

    def are_waiting(self) -> bool:
        """Tell whether such work waits."""
        ...

    def run(self) -> None:
        """Do the waiting work until there is none."""
        ...


class Upkeep(Protocol):
    """Work that improves an engine while it serves."""

    @property
    def is_done(self) -> bool:
        """The upkeep has nothing left to do."""
        ...

    @property
    def is_due(self) -> bool:
        """The upkeep has something to do in a moment without requests."""
        ...

    def poll(self) -> None:
        """Do what takes no time; to be called between steps."""
        ...

    def run(self, others: Others) -> None:
        """Do what is due, giving way to ``others``."""
        ...

    def close(self) -> None:
        """Give up what is not done."""
        ...

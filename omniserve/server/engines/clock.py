"""The clock of an engine's process, which is another one where that runs on another machine."""

from __future__ import annotations

import asyncio
import dataclasses
import math

from omniserve.core.request import RequestOutput

# The clock of another machine may drift so much from one sign of life to the next.
_DRIFT_S = 20e-6


class Clock:
    """The clock of an engine's process, by the answers to signs of life; this process's own until there is one."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._error_s = math.inf
        self.known = asyncio.Event()
        """Set by the first answer."""

    def note(self, sent_s: float, clock_s: float, now_s: float) -> None:
        """Note that a question of ``sent_s`` was answered at ``clock_s`` there, and the answer came at ``now_s``.

        The answer that was under way for the shortest time counts; later ones win little by little, as clocks drift.
        """
        self._error_s += _DRIFT_S
        if (error_s := (now_s - sent_s) / 2) <= self._error_s:
            self._ahead_s, self._error_s = clock_s - (sent_s + now_s) / 2, error_s
        self.known.set()

    def there(self, seconds: float) -> float:
        """Return a time of this process's clock by the engine's."""
        return seconds + self._ahead_s

    def here(self, output: RequestOutput) -> RequestOutput:
        """Return an output with the times of this process's clock."""
        if output.times is None:
            return output
        names = ("arrival_s", "first_scheduled_s", "first_token_s", "finished_s", "host_since_s")
        found = {name: value - self._ahead_s for name in names if (value := getattr(output.times, name)) is not None}
        stays = tuple((begun_s - self._ahead_s, ended_s - self._ahead_s) for begun_s, ended_s in output.host_stays)
        return dataclasses.replace(output, times=dataclasses.replace(output.times, **found), host_stays=stays)

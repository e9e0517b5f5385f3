"""Progress, which detects from the counters of a host tier that a thread of it hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from omniserve.core.stats import HostTierStats

logger = logging.getLogger(__name__)

_LONGEST_GAP_S = 1.0  # if two polls are further apart, the caller was busy or stopped, not the tier


@dataclass(frozen=True, slots=True)
class HostLinkStats:
    """The engine's figures of a CPU host on the network, in the order of ``HostLinkStats`` in ``host_tier.h``."""

    host: int
    is_lost: int
    tasks_in_hand: int
    moves_in_hand: int
    times_lost: int
    """Counter since the engine began, like those that follow."""
    tasks_sent: int
    bytes_sent: int
    """Bytes of q, k and v."""
    bytes_received: int
    """Bytes of results."""
    bytes_moved: int
    """Bytes of blocks, both ways."""
    busy_ns: int
    """Time of the host's threads at work, summed, as the host has told last in this session, like those that follow."""
    kv_bytes_read: int
    threads_alive: int
    tasks_done: int


class Progress:
    """Compares the counters of a tier that has work in hand, twice within `patience_s`; each poll calls `look`."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.is_stalled = False
        """The tier has made no progress for `patience_s`. This stays True, because the work was given up."""
        self._looked_s = time.monotonic()
        self._quiet_s = 0.0
        self._counters: tuple[float, int] | None = None

    def look(self, stats: Callable[[], HostTierStats], *, has_news: bool) -> None:
        """Note a poll, which returned an event if `has_news`; `stats` is only called after a long time without one."""
        now_s = time.monotonic()
        self._quiet_s += min(now_s - self._looked_s, _LONGEST_GAP_S)
        self._looked_s = now_s
        if has_news:
            self._quiet_s, self._counters = 0.0, None
        if self.is_stalled or self._quiet_s < self.patience_s / 2:
            return
        now, before = stats(), self._counters
        in_hand = now.tasks_in_hand + now.moves_in_hand
        self._quiet_s, self._counters = 0.0, (now.busy_seconds, now.bytes_moved) if in_hand else None
        if self._counters is not None and self._counters == before:
            self.is_stalled = True
            logger.error(
                "the host tier is stalled: with %d tasks and %d moves in hand, its %d threads finished nothing for %g "
                "s; it gets no more work until the engine is started again",
                now.tasks_in_hand,
                now.moves_in_hand,
                now.threads_alive,
                self.patience_s,
            )

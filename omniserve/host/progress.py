"""Progress: finds out that a host tier does not get on with the work that it has in hand: one of its threads hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from omniserve.host.stats import HostTierStats

logger = logging.getLogger(__name__)

_LONGEST_GAP_S = 1.0  # between two looks; beyond it the caller was busy or stopped, not the tier


class Progress:
    """Looks whenever the tier is polled: twice, half the patience apart, the same counters and work in hand.

    Args:
        patience_s: How long nothing may get on. A thread finishes a piece of work within milliseconds.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.is_stalled = False
        """The tier has not got on for `patience_s`. It stays so: what waited for the tier was given up."""
        self._looked_s = time.monotonic()
        self._quiet_s = 0.0
        self._counters: tuple[float, int] | None = None

    def look(self, stats: Callable[[], HostTierStats], *, has_news: bool) -> None:
        """Book a poll.

        Args:
            stats: The tier's; called when it has been quiet for long.
            has_news: The poll returned an event.
        """
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
                now.tasks_in_hand, now.moves_in_hand, now.threads_alive, self.patience_s,
            )  # fmt: skip

"""Backlog: how many requests of each class wait for their first token, and how many may."""

from __future__ import annotations

from collections.abc import Iterable

from omniserve.server.errors import ApiError

# Weight of the newest request in the mean of how long they waited.
_NEWEST = 0.1
_LONGEST_RETRY_S = 60.0


class Backlog:
    """Counts requests from the moment they are sent to the engine until their first token.

    Args:
        class_names: The engine's classes.
        most: Requests of one class that may wait at a time, >= 1.
    """

    def __init__(self, class_names: Iterable[str], most: int) -> None:
        self._most = most
        self.num_waiting = dict.fromkeys(class_names, 0)
        self._waited_s = dict.fromkeys(self.num_waiting, 0.0)

    def enter(self, service_class: str, number: int) -> None:
        """Count requests that are about to wait.

        Raises:
            ApiError: There are too many of their class already: 429, or 400 if there could never be so many.
        """
        if number > self._most:
            raise ApiError(
                f"the call is {number} requests (prompts times n), but only {self._most} of a class may wait "
                "(--max-queued-requests); send several calls"
            )
        if self.num_waiting[service_class] + number > self._most:
            raise ApiError(
                f"{self.num_waiting[service_class]} requests of class {service_class!r} wait already, of at most "
                f"{self._most}; send the request again later",
                status=429,
                code="queue_full",
                retry_after_s=min(self._waited_s[service_class], _LONGEST_RETRY_S),
            )
        self.num_waiting[service_class] += number

    def leave(self, service_class: str, waited_s: float) -> None:
        """Count one request that had its first token, or that ended before."""
        self.num_waiting[service_class] -= 1
        self._waited_s[service_class] += _NEWEST * (waited_s - self._waited_s[service_class])

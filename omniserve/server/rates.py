"""Rates: how much the holder of a key may ask for in a minute."""

from __future__ import annotations

import math

from omniserve.server.errors import ApiError
from omniserve.server.keys import ApiKey


class Allowance:
    """What may be used up, refilled evenly; it holds at most a minute's worth.

    Args:
        per_minute: How fast it refills.
        now_s: It is full now; seconds on any clock.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._per_s = per_minute / 60
        self._most = max(1.0, per_minute)
        self._left = self._most
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Return in how many seconds at least 1 will be there; 0 if it is."""
        self._refill(now_s)
        return max(0.0, (1 - self._left) / self._per_s)

    def use(self, amount: float, now_s: float) -> None:
        """Take an amount, also one that is not there: the debt is waited for."""
        self._refill(now_s)
        self._left -= amount

    def _refill(self, now_s: float) -> None:
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class Rates:
    """The rates of one key.

    A call is admitted while requests and tokens are left. Its prompt counts when it begins and its output when it has
    ended, so that calls which run at the same time may use more than is left; what follows waits for that.
    """

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self._key = key
        per_minute = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self._allowances = {what: Allowance(n, now_s) for what, n in per_minute.items() if n is not None}

    def admit(self, now_s: float) -> None:
        """Count a call.

        Raises:
            ApiError: 429: too many requests or tokens of late.
        """
        for what, allowance in self._allowances.items():
            if (wait_s := allowance.wait_s(now_s)) > 0:
                limit = self._key.requests_per_minute if what == "requests" else self._key.tokens_per_minute
                raise ApiError(
                    f"the API key {self._key.name!r} has used up its {limit:g} {what} a minute; "
                    f"send the request again in {math.ceil(wait_s)} s",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        if "requests" in self._allowances:
            self._allowances["requests"].use(1, now_s)

    def use_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or an output."""
        if "tokens" in self._allowances:
            self._allowances["tokens"].use(num_tokens, now_s)

"""Callers: every request is matched with a key before anything else is done for it, and counted for that key."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omniserve.core.request import ClassSpec
from omniserve.server.errors import ApiError
from omniserve.server.keys import ApiKey, KeyRing
from omniserve.server.limits import BodyReader
from omniserve.server.protocol import R

_FREE_PATHS = ("/health", "/metrics")
# A page in a browser is asked for without a key. It asks for one, and its files say nothing about the server.
_PAGE, _PAGE_FILES = "/dashboard", "/dashboard/static/"


class _Allowance:
    """A budget that refills evenly and holds at most a minute's worth.

    Args:
        per_minute: How fast it refills.
        now_s: It is full now; seconds on any clock.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
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


class Caller:
    """The holder of a key, as calls are made with it.

    A call is admitted while requests and tokens are left. Its prompt counts when it begins and its output when it has
    ended, so that calls which run at the same time may use more than is left; what follows waits for that.

    Args:
        key: Theirs; None where no keys are asked for.
        clock: Seconds.
    """

    def __init__(self, key: ApiKey | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = key
        self._clock = clock
        per_minute = {} if key is None else {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self._allowances = {what: _Allowance(n, clock()) for what, n in per_minute.items() if n is not None}

    @property
    def name(self) -> str | None:
        """The name of the key in logs; None without a key."""
        return None if self._key is None else self._key.name

    def admit(self) -> None:
        """Count a call.

        Raises:
            ApiError: 429: too many requests or tokens of late.
        """
        now_s = self._clock()
        for what, allowance in self._allowances.items():
            if (wait_s := allowance.wait_s(now_s)) > 0:
                raise ApiError(
                    f"the API key {self.name!r} has used up its {allowance.per_minute:g} {what} a minute; "
                    f"send the request again in {math.ceil(wait_s)} s",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        if "requests" in self._allowances:
            self._allowances["requests"].use(1, now_s)

    def use_tokens(self, num_tokens: int) -> None:
        """Count tokens of a prompt or an output."""
        if "tokens" in self._allowances:
            self._allowances["tokens"].use(num_tokens, self._clock())

    def limited(self, request: R, classes: Sequence[ClassSpec]) -> R:
        """Return the request with the tier that they get.

        Raises:
            ApiError: There is no such tier.
        """
        if self._key is None:
            return request
        tier = self._key.limited_tier(request.service_tier, classes)
        return request if tier == request.service_tier else request.model_copy(update={"service_tier": tier})

    def reaches(self, tier: str, classes: Sequence[ClassSpec]) -> bool:
        """Return whether a request of theirs that asks for a tier gets it."""
        return self._key is None or self._key.limited_tier(tier, classes) == tier


_ANYBODY = Caller(None)


def caller_of(request: Request) -> Caller:
    """Return the caller of a request; behind no gate all requests have the same one, without limits."""
    return getattr(request.state, "caller", _ANYBODY)


@contextlib.asynccontextmanager
async def take_body(http: Request, bodies: BodyReader) -> AsyncIterator[bytes]:
    """Count a call for its caller, then hold its body; see ``BodyReader.hold``.

    Raises:
        ApiError: 429: the caller made too many calls of late. Others: as ``hold`` does.
    """
    caller_of(http).admit()
    async with bodies.hold(http) as body:
        yield body


class Gate:
    """ASGI middleware that lets in only requests with a known key, and notes their callers.

    Args:
        app: What is behind it.
        ring: The keys.
        guard_all: Ask for a key for health and metrics, too.
        on_refused: Told of each refusal.
    """

    def __init__(self, app: ASGIApp, *, ring: KeyRing, guard_all: bool, on_refused: Callable[[ApiError], None]) -> None:
        self._app = app
        self._ring = ring
        self._callers = {key.name: Caller(key) for key in ring.keys}
        self._guard_all = guard_all
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # the server has neither websockets nor a lifespan
        if not is_free(scope["path"], self._guard_all):
            headers = dict(scope["headers"])
            try:
                key = self._ring.find(headers.get(b"authorization", b""))
            except ApiError as error:
                self._on_refused(error)
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = self._callers[key.name]
        await self._app(scope, receive, send)


def is_free(path: str, guard_all: bool) -> bool:
    """Return whether a path needs no key."""
    if path == _PAGE or path.startswith(_PAGE_FILES):
        return True
    return not guard_all and any(path == free or path.startswith(f"{free}/") for free in _FREE_PATHS)

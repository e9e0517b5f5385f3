"""Who calls: every request is matched with a key before anything else is done for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omniserve.core.request import ClassSpec
from omniserve.server.body import BodyReader
from omniserve.server.errors import ApiError
from omniserve.server.keys import ApiKey, KeyRing
from omniserve.server.protocol import R
from omniserve.server.rates import Rates

_FREE_PATHS = ("/health", "/metrics")
# A page in a browser is asked for without a key. It asks for one, and its files say nothing about the server.
_PAGE, _PAGE_FILES = "/dashboard", "/dashboard/static/"


class Caller:
    """Whoever a call is for.

    Args:
        key: Theirs; None where no keys are asked for.
        clock: Seconds.
    """

    def __init__(self, key: ApiKey | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = key
        self._clock = clock
        self._rates = None if key is None else Rates(key, clock())

    @property
    def name(self) -> str | None:
        """What logs call them; None for somebody without a key."""
        return None if self._key is None else self._key.name

    def admit(self) -> None:
        """Count a call.

        Raises:
            ApiError: 429: they made too many of late.
        """
        if self._rates is not None:
            self._rates.admit(self._clock())

    def use_tokens(self, num_tokens: int) -> None:
        """Count tokens of a prompt or an output."""
        if self._rates is not None:
            self._rates.use_tokens(num_tokens, self._clock())

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
    """Return whose key a request came with; behind no gate everybody is the same caller without limits."""
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
    """ASGI middleware that lets only holders of keys in, and notes who they are.

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

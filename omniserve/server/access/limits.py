"""Upper bounds on what one server accepts, in all and from each key: no client can make it grow without bound."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omniserve.core.request import ClassSpec
from omniserve.server.access.keys import ApiKey, KeyRing
from omniserve.server.access.tiers import prioritised_tier
from omniserve.server.anthropic.errors import error_response
from omniserve.server.completions.protocol import R
from omniserve.server.errors import ApiError

MIB = 1 << 20
# Largest bodies that may be in memory at a time.
_BODIES_AT_A_TIME = 8
# Weight of the newest request in the mean of how long they waited.
_NEWEST = 0.1
_LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds of a server.

    Raises:
        ValueError: One is out of its range.
    """

    max_body_mib: float = 32.0
    """Largest body of a request to generate something, in MiB."""
    max_queued_requests: int = 4096
    """Most requests of a class that wait for their first token; more get 429."""
    max_unread_tokens: int = 8192
    """A stream ends with an error if its reader leaves more tokens of a choice unread."""
    best_effort_stream_interval_s: float = 0.2
    """The new text of a best-effort stream is sent at most once in so many seconds, its first and its last at once. 0:
    after each step. Every message takes time of a core from steps and from LS requests."""
    stream_comment_interval_s: float = 15.0
    """A stream that has sent nothing for so many seconds, because its request waits, sends a comment, which clients
    skip, so that no proxy cuts it. 0: none."""
    stall_timeout_s: float = 60.0
    """A stream ends if its reader takes nothing for so many seconds. A body, or the head of a request on an open
    connection, has so long to arrive."""
    max_connections: int | None = None
    """Most open connections; idle ones give way to new ones, and if there are none, new ones get 503. None: what the
    limit of open files allows, up to 10,000."""
    shutdown_timeout_s: float = 30.0
    """Seconds that running requests may go on after SIGTERM."""
    engine_restarts: int = 3
    """The number of times in a row that an engine which died is started again; 0: its death ends the server."""
    engine_heartbeat_s: float = 20.0
    """An engine that has given no sign of life for so many seconds, of which a well one gives two a second whatever it
    computes, is taken for dead: it is killed, and started again."""
    profile_time_limit_s: float = 30.0
    """Seconds of measuring if there is no latency profile yet."""
    profile_start_s: float = 4.0
    """Seconds of these before the port is opened, on a CPU; the others follow while there are no requests. 0: all, and
    layers are compiled before, too."""
    batch_concurrency: int = 64
    """Most lines of batches that are in work at a time, for each engine."""
    batch_max_lines: int = 50_000
    """Most lines of one input file."""
    max_file_mib: float = 200.0
    """Largest file that is taken, in MiB."""
    response_days: float = 30.0
    """Days that a stored response is kept. 0: none is stored."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_0 = field.name in (
                "shutdown_timeout_s",
                "engine_restarts",
                "profile_start_s",
                "best_effort_stream_interval_s",
                "stream_comment_interval_s",
                "response_days",
            )
            if field.name == "engine_heartbeat_s" and not value >= 2:
                raise ValueError(f"engine_heartbeat_s must be at least 2, got {value}")
            if value is not None and not (math.isfinite(value) and (value > 0 or (may_be_0 and value == 0))):
                raise ValueError(f"{field.name} must be a number {'>=' if may_be_0 else '>'} 0, got {value}")


class Backlog:
    """Counts requests from being sent to the engine until their first token, at most ``most`` of a class.

    Where the limit is reached, a tenant is still let in up to its share of it by weight, among those that have requests
    waiting: no tenant can fill the queue for others. So ``n`` tenants of the same weight have at most
    ``1 + 1/2 + ... + 1/n`` times ``most`` requests waiting together.
    """

    def __init__(self, class_names: Iterable[str], most: int) -> None:
        self._most = most
        self.num_waiting = dict.fromkeys(class_names, 0)
        self._waited_s = dict.fromkeys(self.num_waiting, 0.0)
        self._of_tenants: dict[str, Counter[str]] = {name: Counter() for name in self.num_waiting}
        self._weights: dict[str, float] = {}

    def enter(self, service_class: str, number: int, *, tenant: str = "", weight: float = 1.0) -> None:
        """Count requests that are about to wait, of a tenant with a weight.

        Raises:
            ApiError: There are too many of their class already: 429, or 400 if there could never be so many.
        """
        if number > self._most:
            raise ApiError(
                f"the call is {number} requests (prompts times n), but only {self._most} of a class may wait "
                "(--limit max_queued_requests); send several calls"
            )
        self._weights[tenant] = weight
        of_tenants = self._of_tenants[service_class]
        is_full = self.num_waiting[service_class] + number > self._most
        if is_full and of_tenants[tenant] + number > self._share(of_tenants, tenant):
            raise ApiError(
                f"{self.num_waiting[service_class]} requests of class {service_class!r} wait already, of at most "
                f"{self._most}; send the request again later",
                status=429,
                code="queue_full",
                retry_after_s=self.retry_s(service_class),
            )
        self.num_waiting[service_class] += number
        of_tenants[tenant] += number

    def retry_s(self, service_class: str) -> float:
        """Return how long a client should wait: as long as requests of the class have waited lately, or a minute."""
        return min(self._waited_s[service_class], _LONGEST_RETRY_S)

    def _share(self, of_tenants: Counter[str], tenant: str) -> float:
        """Return how many requests a tenant may have waiting when the queue is full."""
        others = sum(self._weights[other] for other, number in of_tenants.items() if number and other != tenant)
        return self._most * self._weights[tenant] / (others + self._weights[tenant])

    def leave(self, service_class: str, waited_s: float, *, tenant: str = "") -> None:
        """Count one request that had its first token, or that ended before."""
        self.num_waiting[service_class] -= 1
        self._of_tenants[service_class][tenant] -= 1
        self._waited_s[service_class] += _NEWEST * (waited_s - self._waited_s[service_class])


class BodyReader:
    """Reads bodies of requests: each up to a size, and all that are held at a time up to a few times that.

    Args:
        max_bytes: Largest body.
        timeout_s: How long a body may take to arrive.
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._left = _BODIES_AT_A_TIME * max_bytes

    @contextlib.asynccontextmanager
    async def hold(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body, which counts as held until the block ends: until it is parsed and its text encoded, say.

        Raises:
            ClientDisconnect: The client left before its end.
            ApiError: 413: it is too large. 408: it takes too long. 503: too much is held at this moment.
        """
        parts, size = [], 0
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for part in request.stream():
                        size += len(part)
                        self._left -= len(part)
                        self._check(size)
                        parts.append(part)
            except TimeoutError:
                raise ApiError(
                    f"the body did not arrive within {self._timeout_s:g} s (--limit stall_timeout_s); "
                    "send less, or faster",
                    status=408,
                    code="request_timeout",
                ) from None
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self._left += size

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise ApiError(
                f"the body is larger than {self._max_bytes / MIB:g} MiB (--limit max_body_mib); send less",
                status=413,
                code="request_too_large",
            )
        if self._left < 0:
            raise ApiError(
                "too many large requests arrive at this moment; send the request again later",
                status=503,
                code="overloaded",
                retry_after_s=1,
            )


_FREE_PATHS = ("/health", "/metrics")
# A page in a browser is asked for without a key. It asks for one, and its files say nothing about the server.
_PAGES, _PAGE_FILES = ("/", "/dashboard"), "/dashboard/static/"


class _Allowance:
    """A budget that refills evenly and holds at most a minute's worth, which it has now; seconds on any clock."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._per_s = per_minute / 60
        self._most = max(1.0, per_minute)
        self._left = self._most
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until at least 1 is left; 0 if it is now."""
        self._refill(now_s)
        return max(0.0, (1 - self._left) / self._per_s)

    def use(self, amount: float, now_s: float) -> None:
        """Take an amount; it may exceed what is left, and the debt has to refill first."""
        self._refill(now_s)
        self._left -= amount

    def _refill(self, now_s: float) -> None:
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class Caller:
    """Counts the calls and tokens of one key.

    A call is admitted while requests and tokens are left. Its prompt counts when it begins and its output when it has
    ended, so that calls which run at the same time may use more than is left; what follows waits for that. The
    key is None where no keys are asked for.
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

    @property
    def is_admin(self) -> bool:
        """The caller may change what the server serves; anyone may where no keys are asked for."""
        return self._key is None or self._key.admin

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

    async def enter(self) -> None:
        """Do as ``admit``; where another process counts the key's calls, ask it."""
        self.admit()

    def use_tokens(self, num_tokens: int) -> None:
        """Count tokens of a prompt or an output."""
        if "tokens" in self._allowances:
            self._allowances["tokens"].use(num_tokens, self._clock())

    def limited(self, request: R, classes: Sequence[ClassSpec]) -> R:
        """Return the request with the tier that its priority and this key make of the one that it asks for.

        Raises:
            ApiError: There is no such tier.
        """
        tier = request.service_tier
        if request.priority:
            tier = prioritised_tier(tier, request.priority, classes)
        if self._key is not None:
            tier = self._key.limited_tier(tier, classes)
        return request if tier == request.service_tier else request.model_copy(update={"service_tier": tier})

    def reaches(self, tier: str, classes: Sequence[ClassSpec]) -> bool:
        """Return whether a request with this key that asks for a tier gets it."""
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
    await caller_of(http).enter()
    async with bodies.hold(http) as body:
        yield body


class Gate:
    """ASGI middleware that lets in only requests with a known key, and notes their callers, before all else.

    Args:
        ring: The keys.
        guard_all: As ``is_free`` takes it.
        on_refused: Told of each refusal.
        caller: Makes the caller of a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        ring: KeyRing,
        guard_all: bool,
        on_refused: Callable[[ApiError], None],
        caller: Callable[[ApiKey], Caller] = Caller,
    ) -> None:
        self._app = app
        self._ring = ring
        self._callers = {key.name: caller(key) for key in ring.keys}
        self._guard_all = guard_all
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # the server has neither websockets nor a lifespan
        if not is_free(scope["path"], self._guard_all):
            headers = dict(scope["headers"])
            try:
                key = self._ring.find(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
            except ApiError as error:
                self._on_refused(error)
                await error_response(error, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = self._callers[key.name]
        await self._app(scope, receive, send)


def is_free(path: str, guard_all: bool) -> bool:
    """Return whether a path needs no key."""
    if path in _PAGES or path.startswith(_PAGE_FILES):
        return True
    return not guard_all and any(path == free or path.startswith(f"{free}/") for free in _FREE_PATHS)

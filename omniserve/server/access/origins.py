"""The web pages that may use a server without keys: its own, and those of origins that were named.

Any page that a user opens can send requests to 127.0.0.1: forms and ``text/plain`` bodies without asking the server
first. It cannot read the answer, but a batch would be cancelled all the same. A page of a name that is made to lead
here (DNS rebinding) may even read it, as it is of the same origin then. Where keys are asked for, none of this is
needed: no browser adds a key by itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from omniserve.server.anthropic.errors import error_response
from omniserve.server.errors import ApiError

ANY = "*"
"""Stands for all origins."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


def checked_origin(text: str) -> str:
    """Return an origin as browsers send it: in lower case, without a default port.

    Raises:
        ValueError: It is none.
    """
    if text in (ANY, "null"):
        return text
    try:
        url = urlsplit(text.lower())
        name, port = url.hostname, url.port
    except ValueError:
        name = None
    if not name or not url.scheme or url.path not in ("", "/") or url.query or url.fragment or "@" in url.netloc:
        raise ValueError(f"--cors-origin must be an origin such as https://chat.example.org, or *, got {text!r}")
    name = f"[{name}]" if ":" in name else name
    return f"{url.scheme}://{name}" + ("" if port in (None, _DEFAULT_PORTS.get(url.scheme)) else f":{port}")


def is_loopback(name: str) -> bool:
    """Tell whether an address or a name is this machine's own, wherever it is asked.

    An unspecified address (0.0.0.0) is not: to listen there is to listen everywhere.
    """
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        name = name.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class PageGuard:
    """ASGI middleware: answers 403 to requests of foreign pages, before anything is read of them.

    A page is foreign if its ``Origin`` is neither the server's own nor one of ``origins``. With ``on_loopback`` so is
    every ``Host`` but this machine's own names, on any port, and the hosts of ``origins``, which a proxy may pass on.
    Elsewhere a server cannot know its names. Requests without ``Origin`` are of no page, or only read.

    Args:
        origins: As ``checked_origin`` returns them.
        on_loopback: The server listens on a loopback address.
        on_refused: It is told of each refusal.
    """

    def __init__(
        self, app: ASGIApp, *, origins: Sequence[str], on_loopback: bool, on_refused: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._origins = set(origins)
        self._on_loopback = on_loopback
        self._hosts = {urlsplit(origin).hostname for origin in origins}
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # the server has neither websockets nor a lifespan
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        error = None if ANY in self._origins else self._refusal(headers.get(b"host"), headers.get(b"origin"), headers)
        if error is None:
            await self._app(scope, receive, send)
            return
        self._on_refused(error)
        scope.setdefault("state", {})["refusal"] = error
        await error_response(error, scope)(scope, receive, send)

    def _refusal(self, host: str | None, origin: str | None, headers: dict[bytes, str]) -> ApiError | None:
        if self._on_loopback and host is not None and not self._is_own(host):
            return ApiError(
                f"the Host {host[:200]!r} is not this server's, which listens on a loopback address: call it as "
                "localhost or 127.0.0.1; if a proxy passes this name on, give --cors-origin with the proxy's origin "
                "(such as https://chat.example.org), or --api-key",
                status=403,
                code="host_not_allowed",
            )
        if origin is None or origin in self._origins or headers.get(b"sec-fetch-site") == "same-origin":
            return None  # no page can write Sec-Fetch-Site; behind a proxy Host may be another than the page's
        if host is not None and _is_same(origin, host):
            return None
        return ApiError(
            f"pages of the origin {origin[:200]!r} may not call this server: give --cors-origin with that origin if "
            "they may, or --api-key",
            status=403,
            code="origin_not_allowed",
        )

    def _is_own(self, host: str) -> bool:
        name = _name_and_port(f"//{host}")[0]
        if name is None:
            return False
        # No name leads to an address that is written as one; a browser's 0.0.0.0 is this machine, too.
        return is_loopback(name) or name in ("0.0.0.0", "::") or name in self._hosts


def _is_same(origin: str, host: str) -> bool:
    """Tell whether a page of an origin has come from a host, whatever scheme a proxy between them has."""
    name, port = _name_and_port(origin)
    default = _DEFAULT_PORTS.get(origin.partition(":")[0])
    host_name, host_port = _name_and_port(f"//{host}")
    return name is not None and (name, port or default) == (host_name, host_port or default)


def _name_and_port(url: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(url)
        if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
            return None, None
        return parts.hostname, parts.port
    except ValueError:
        return None, None

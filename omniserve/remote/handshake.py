"""Handshake: the first messages on a link between two processes, a hello and then a welcome or a refusal.

Both ends have proved by then that they know the secret (``core.link``). CPU hosts, prefill engines and the ranks of a
model all begin so; what an end says of itself (``Hello.caller``) and what it is given (``Welcome.terms``) differ. Every
hello names the version, because what follows is for both ends of the same version.

An engine and its CPU hosts exchange JSON, so that a host runs no code that an engine sends: there ``caller`` and
``terms`` are dictionaries. All others exchange pickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniserve.core import link
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.link import Link


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of the end that has connected."""

    version: str
    """All that must be the same at both ends: the version of OmniServe, and perhaps more."""
    caller: Any
    """What the end says of itself, and what it asks for."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer that accepts the end that has connected."""

    terms: Any = None
    """What that end needs to know to go on."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer that refuses the end that has connected, which is closed behind it."""

    why: str
    may_change: bool = False
    """True: the reason may pass, and the same hello may be accepted later."""


def introduce(peer: Link, hello: Hello, timeout_s: float | None, *, refusal: str = "") -> Any:
    """Send a hello, and return the terms of the welcome. ``refusal`` precedes the reason in errors.

    Raises:
        PeerRefused: The other end refuses this one for good, or answers neither a welcome nor a refusal.
        PeerLost: The other end refuses this one for now, is gone, or does not answer in time.
    """
    peer.send(hello)
    answer = peer.receive(timeout_s)
    if isinstance(answer, Welcome):
        return answer.terms
    if isinstance(answer, Refused):
        raise (PeerLost if answer.may_change else PeerRefused)(f"{refusal}{answer.why}")
    raise PeerRefused(f"{refusal}it answers {type(answer).__name__}")


def refuse(peer: Link, why: str, *, may_change: bool = False) -> None:
    """Refuse the other end, and close the connection.

    Raises:
        PeerLost: The other end is gone.
    """
    peer.send(Refused(why, may_change))
    peer.close()


def _to_plain(message: Hello | Welcome | Refused) -> Any:
    match message:
        case Hello(version, caller):
            return {"version": version, **caller}
        case Welcome(terms):
            return terms
        case Refused(why, may_change):
            return {"refused": why, "may_change": may_change}


def _of_plain(data: Any) -> Hello | Welcome | Refused:
    if isinstance(data, dict) and "refused" in data:
        return Refused(data["refused"], bool(data.get("may_change")))
    if isinstance(data, dict) and "purpose" in data:
        return Hello(data.get("version", ""), data)
    return Welcome(data)


JSON = link.Codec(lambda message: link.JSON.dumps(_to_plain(message)), lambda data: _of_plain(link.JSON.loads(data)))
"""The messages of a handshake as JSON, for an engine and a CPU host. A hello has its ``purpose`` among the caller's."""

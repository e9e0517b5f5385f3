"""Limits: what one server takes at most, so that no client can make it grow without bound."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """See ``server_flags`` for what happens beyond each."""

    max_body_bytes: int = 32 * MIB
    """Of one request to generate something."""
    max_queued_requests: int = 4096
    """Of each class, waiting for their first token."""
    max_unread_tokens: int = 8192
    """Per choice of a stream, waiting for its reader."""
    stall_timeout_s: float = 60.0
    """A client that takes nothing of its stream for so long is taken for gone; a body has so long to arrive, and so has
    the head of a request on an open connection."""
    max_connections: int | None = None
    """At a time; None: as the limit of open files allows, up to 10,000."""

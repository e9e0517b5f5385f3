"""Exceptions that a caller of OmniServe is expected to react to."""

from __future__ import annotations


class OmniServeError(Exception):
    """Base of every error that OmniServe raises on purpose."""


class UnsupportedModelError(OmniServeError):
    """The model's architecture has no layer family, or a feature of it is not supported."""


class RequestRejected(OmniServeError):
    """A well-formed request was refused because of load.

    Attributes:
        retry_after_s: When a retry is expected to be admitted, in seconds; None when unknown.
        predicted_ttft_s: The time to first token that it would have had.
        required_ttft_s: Its objective.
        predicted_s: The time that the whole output would have taken; None if that was not the reason.
        required_s: The deadline for it.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        predicted_ttft_s: float | None = None,
        required_ttft_s: float | None = None,
        predicted_s: float | None = None,
        required_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.predicted_ttft_s = predicted_ttft_s
        self.required_ttft_s = required_ttft_s
        self.predicted_s = predicted_s
        self.required_s = required_s


class Stalled(OmniServeError):
    """The device or the host tier did not finish in time what it was given; only a new process can go on."""


class PeerLost(OmniServeError):
    """A process that this one works with over a connection of their own is gone, or does not answer.

    If it serves a part of the model (a rank), only a new engine can go on; an engine goes on without a CPU host.
    """


class PeerClosed(PeerLost):
    """The other process has closed its connection between two messages, as it does when it ends."""


class PeerRefused(PeerLost):
    """The other process is there, but does not take this one: another secret or version, or no place is free."""


class EngineStopped(OmniServeError):
    """The engine was closed, or its process died, while a request was still running."""

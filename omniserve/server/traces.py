"""Traces of finished calls, and the sender of traces, if a collector is named."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from omniserve.core.request import FinishReason
from omniserve.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from omniserve.server.output_stream import OutputStream

if TYPE_CHECKING:
    from omniserve.server.otlp import OtlpTraces

logger = logging.getLogger(__name__)

# Where OpenTelemetry's exporter looks when it is not told where to send.
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSTALL = "the OpenTelemetry SDK and its OTLP exporter: pip install 'omniserve[otel]'"
TRACED_PATHS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
"""Path -> what OpenTelemetry calls the operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedCall:
    """A call that is over, however it ended."""

    path: str
    headers: Mapping[str, str]
    """The request's, names in lower case."""
    request_id: str | None
    """The call's ``x-request-id``."""
    began_s: float
    """Arrival of the request in monotonic seconds."""
    ended_s: float
    """Time at which the last byte of the answer was written, or the client was gone."""
    status: int | None
    """Status of the answer; None if there was none."""
    refusal: ApiError | None
    """The error that was the answer instead of an output."""
    outputs: OutputStream | None
    """Closed; None if the call did not come that far."""

    @property
    def error(self) -> Exception | None:
        """The error that the call ended with, instead of an answer or after a part of one; None without one."""
        return self.refusal or (self.outputs.error if self.outputs is not None else None)

    @property
    def was_abandoned(self) -> bool:
        """True if it ended because the client went away."""
        cut = self.outputs is not None and any(
            choice.finish_reason == FinishReason.ABORT for choice in self.outputs.choices
        )
        return self.error is None and (cut or self.status in (None, CLIENT_CLOSED_REQUEST))


def checked_endpoint(url: str) -> str:
    """Return the URL after making sure that traces can be sent to it.

    Raises:
        ValueError: It is no URL of a collector, or the packages for it are not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--otlp-endpoint must be the URL of a collector, such as http://127.0.0.1:4318, got {url!r}")
    try:
        importlib.import_module("omniserve.server.otlp")
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs {_INSTALL} ({error})") from None
    return url


def open_traces(endpoint: str | None, *, model_name: str) -> OtlpTraces | None:
    """Return the sender of traces to ``endpoint``, or to where the environment says; None if neither names a place.

    That the environment asks for what is not installed is a warning: it may mean other programs.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        return None
    try:
        from omniserve.server.otlp import OtlpTraces
    except ImportError as error:
        logger.warning("%s asks for traces, but there will be none without %s (%s)",
                       next(name for name in _ENDPOINT_VARIABLES if os.environ.get(name)), _INSTALL, error)  # fmt: skip
        return None
    return OtlpTraces(endpoint, model_name=model_name)

"""The sender of traces, if a collector is named and the packages for it are installed."""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from omniserve.server.telemetry.otlp import OtlpTraces

logger = logging.getLogger(__name__)

# Where OpenTelemetry's exporter looks when it is not told where to send.
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSTALL = "the OpenTelemetry SDK and its OTLP exporter: pip install 'omniserve[otel]'"


def checked_endpoint(url: str) -> str:
    """Return the URL after making sure that traces can be sent to it.

    Raises:
        ValueError: It is no URL of a collector, or the packages for it are not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--otlp-endpoint must be the URL of a collector, such as http://127.0.0.1:4318, got {url!r}")
    try:
        importlib.import_module("omniserve.server.telemetry.otlp")
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
        from omniserve.server.telemetry.otlp import OtlpTraces
    except ImportError as error:
        logger.warning(
            "%s asks for traces, but there will be none without %s (%s)",
            next(name for name in _ENDPOINT_VARIABLES if os.environ.get(name)),
            _INSTALL,
            error,
        )
        return None
    return OtlpTraces(endpoint, model_name=model_name)

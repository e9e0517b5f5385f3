"""Logs: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import sys
from typing import Any

FORMATS = ("text", "json")
# Fields that an ``extra`` of ours may have; the others of a LogRecord are the logging module's own.
_EXTRA = ("method", "path", "status", "seconds", "key", "call_id", "engine_request_id")

access_logger = logging.getLogger("omniserve.access")
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""The id of the request that the running code works for."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what is known of the request."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None) or request_id.get(),
        }
        fields |= {name: getattr(record, name, None) for name in _EXTRA}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def set_up_logs(
    level: str, log_format: str, *, text: str = "%(levelname)s %(message)s", names: logging.Filter | None = None
) -> None:
    """Log to standard error.

    Args:
        level: Of all loggers.
        log_format: One of FORMATS; with ``json`` each request has a line when it is answered, too.
        text: Lines for people.
        names: Of the engine's requests, in its process.
    """
    handler = logging.StreamHandler(sys.stderr)
    if names is not None:
        handler.addFilter(names)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter(text))
        access_logger.disabled = True
    logging.basicConfig(level=level.upper(), handlers=[handler])

"""Logs of the programs: lines for people, or one JSON object a line, whatever writes them.

A program calls ``set_up_logs`` once. Libraries whose loggers have handlers of their own, as torch's and transformers'
do, log through the program's from then on; those that are imported later do after ``take_over_loggers``.
"""

from __future__ import annotations

import argparse
import contextvars
import datetime
import io
import json
import logging
import logging.handlers
import re
import sys
import threading
from collections.abc import Mapping
from typing import Any

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
# Fields that an ``extra`` of ours may have; the others of a LogRecord are the logging module's own.
_EXTRA = ("method", "path", "status", "seconds", "key", "call_id", "engine_request_id")

access_logger = logging.getLogger("omniserve.access")
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""The id of the request that the running code works for."""

# Messages that are known to be of no use in a log, by logger.
_NOISE = {
    # transformers imports it for quantised models: its GPU kernels, which nothing here calls, were built for one torch.
    "torchao": re.compile(r"Failed to load .*\.so|Skipping import of cpp extensions"),
    # torchao registers its enums in a way that this torch no longer needs; it is torchao's to change.
    "torch.utils._pytree": re.compile(r"is an Enum subclass and is now natively supported"),
}

_MOST_HELD = 1000
_held: logging.handlers.MemoryHandler | None = None
_set_up: tuple[str, str] | None = None


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line: time, level, logger, message, and what is known of the request.

    Args:
        names: For each engine request the ``x-request-id`` of the call that it belongs to, of which a call may have
            several. It is read for each line that has an ``engine_request_id``.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._names = {} if names is None else names

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": self._names.get(getattr(record, "engine_request_id", "")) or request_id.get(),
        }
        fields |= {name: getattr(record, name, None) for name in _EXTRA}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a program whose arguments are given to ``set_up_logs``."""
    parser.add_argument("--log-level", default="info", choices=LOG_LEVELS, help="least level of what is logged")
    parser.add_argument("--log-format", default="text", choices=LOG_FORMATS, help="json: an object a line")


def log_flags() -> list[str]:
    """Return the flags with which another program logs as this one does; none if this one has set up no logs."""
    return [] if _set_up is None else ["--log-level", _set_up[0], "--log-format", _set_up[1]]


def hold_logs() -> None:
    """Keep what is logged, and Python's warnings, until ``set_up_logs`` says how, perhaps in a forked process."""
    global _held
    _silence_noise()
    logging.captureWarnings(True)
    _held = logging.handlers.MemoryHandler(_MOST_HELD, flushLevel=logging.CRITICAL + 1)
    logging.getLogger().addHandler(_held)


def set_up_logs(
    level: str,
    log_format: str,
    *,
    text: str = "%(levelname)s %(name)s: %(message)s",
    names: Mapping[str, str] | None = None,
) -> None:
    """Log to standard error, as lines for people in the format ``text``, or as JSON; Python's warnings, too.

    With JSON each request has a line when it is answered, too, and whatever else Python code writes to standard output
    or error is logged line by line.
    """
    global _held, _set_up
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level.upper())
    handler.setFormatter(JsonFormatter(names) if log_format == "json" else logging.Formatter(text))
    access_logger.disabled = log_format != "json"
    root = logging.getLogger()
    if _held is not None:
        root.removeHandler(_held)
        _held.setTarget(handler)
        _held.close()  # which gives the handler what was kept
        _held = None
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    _silence_noise()
    _set_up = (level, log_format)
    if log_format == "json":
        sys.stdout = _LinesAsLogs("stdout", logging.INFO)
        sys.stderr = _LinesAsLogs("stderr", logging.WARNING)
    take_over_loggers()


def take_over_loggers() -> None:
    """Have libraries that were imported meanwhile log as the program does; nothing before logs are held or set up."""
    if _set_up is None and _held is None:
        return
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)
                logger.propagate = True


def _silence_noise() -> None:
    for name, noise in _NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(noise))


class _Without(logging.Filter):
    """Lets all records pass but those whose message has a pattern in it."""

    def __init__(self, noise: re.Pattern[str]) -> None:
        super().__init__()
        self._noise = noise

    def filter(self, record: logging.LogRecord) -> bool:
        return self._noise.search(record.getMessage()) is None


class _LinesAsLogs(io.TextIOBase):
    """A stream whose lines are log records. What logging itself writes here, because it cannot log, is left out."""

    encoding = "utf-8"

    def __init__(self, name: str, level: int) -> None:
        self._logger, self._level = logging.getLogger(name), level
        self._begun = ""
        self._in_thread = threading.local()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if getattr(self._in_thread, "logs", False):
            return len(text)
        *lines, self._begun = (self._begun + text).split("\n")
        self._in_thread.logs = True
        try:
            for line in lines:
                if line.strip():
                    self._logger.log(self._level, "%s", line.rstrip())
        finally:
            self._in_thread.logs = False
        return len(text)

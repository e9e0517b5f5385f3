"""The command line flags that say how to serve, whatever the engine."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omniserve.core.request import ClassSpec
from omniserve.launch.flags import integer, number, positive
from omniserve.server.batches.settings import BatchSettings, add_batch_flags, batch_settings
from omniserve.server.classes import class_of_tier
from omniserve.server.errors import ApiError
from omniserve.server.keys import ApiKey, KeyRing, digest_of, read_key_file
from omniserve.server.limits import MIB, Limits
from omniserve.server.logs import FORMATS as LOG_FORMATS
from omniserve.server.traces import checked_endpoint

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How to serve, whatever the engine."""

    tokenizer: str
    """Folder or hub id of the tokenizer."""
    model_name: str
    """The name that the model is served under."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    shutdown_timeout_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    keys: KeyRing | None = None
    """Keys of those that may call; None: calls need no key."""
    guard_all: bool = False
    """Ask for a key for health and metrics, too."""
    limits: Limits = field(default_factory=Limits)
    cors_origins: tuple[str, ...] = ()
    """Whose pages may call from a browser."""
    engine_restarts: int = 3
    """How often in a row a dead engine is started again; 0: its death ends the server."""
    otlp_endpoint: str | None = None
    """Base URL of the collector that gets traces; None: the one that the environment names, if any."""
    batches: BatchSettings = field(default_factory=BatchSettings)
    log_level: str = "info"
    log_format: str = "text"


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; their defaults are those of ServerOptions."""
    defaults, limits = {entry.name: entry.default for entry in dataclasses.fields(ServerOptions)}, Limits()
    parser.add_argument("--host", default=defaults["host"], help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=integer(0), default=defaults["port"], help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=number,
        default=defaults["shutdown_timeout_s"],
        help="seconds that running requests may go on after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key", action="append", metavar="KEY", help="ask every caller for this key, or another; repeat it"
    )
    parser.add_argument(
        "--api-key-file",
        action="append",
        type=Path,
        metavar="FILE",
        help="YAML or JSON: a list of keys with name, key or its sha256, and if wanted tier (the highest "
        "service_tier), requests_per_minute and tokens_per_minute; repeat it",
    )
    parser.add_argument("--guard-all", action="store_true", help="ask for a key for /health and /metrics, too")
    parser.add_argument(
        "--max-body-mib",
        type=positive,
        default=limits.max_body_bytes / MIB,
        metavar="MIB",
        help="largest body (default: %(default)s)",
    )
    parser.add_argument(
        "--max-queued-requests",
        type=integer(1),
        default=limits.max_queued_requests,
        metavar="N",
        help="most requests of a class that wait for their first token; more get 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-unread-tokens",
        type=integer(1),
        default=limits.max_unread_tokens,
        metavar="N",
        help="a stream whose reader leaves more tokens unread ends with an error (default: %(default)s a choice)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=positive,
        default=limits.stall_timeout_s,
        metavar="SECONDS",
        help="a stream whose reader takes nothing for so long ends, and a body, or the head of a request, has so long "
        "to arrive (default: %(default)s)",
    )
    parser.add_argument(
        "--max-connections",
        type=integer(1),
        metavar="N",
        help="most open connections; idle ones give way to new ones, and if there are none, new ones get 503 "
        "(default: what the limit of open files allows, up to 10000)",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="pages of this origin may call from a browser, * for all; repeat it (default: none)",
    )
    parser.add_argument(
        "--engine-restarts",
        type=integer(0),
        default=defaults["engine_restarts"],
        metavar="N",
        help="how often in a row an engine that died is started again; 0 ends the server (default: %(default)s)",
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send an OpenTelemetry trace of each request to this collector, such as http://127.0.0.1:4318 "
        "(default: OTEL_EXPORTER_OTLP_ENDPOINT, if set)",
    )
    add_batch_flags(parser)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=defaults["log_level"])
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=defaults["log_format"],
        help="json: an object a line, and a line for each request (default: %(default)s)",
    )


def options_from(
    args: argparse.Namespace, *, tokenizer: str, model_name: str, classes: Sequence[ClassSpec]
) -> ServerOptions:
    """Return the options that the flags ask for.

    Args:
        args: Parsed.
        tokenizer: Its folder or hub id.
        model_name: The name to serve under.
        classes: The engine's, highest priority first.

    Raises:
        ValueError: A flag's value does not fit; the message names it.
    """
    if args.port > 65535:
        raise ValueError(f"argument --port: must be <= 65535, got {args.port}")
    keys = _keys(args.api_key or (), args.api_key_file or (), classes)
    if args.guard_all and keys is None:
        raise ValueError("--guard-all needs keys; give --api-key or --api-key-file")
    return ServerOptions(
        tokenizer=tokenizer,
        model_name=model_name,
        host=args.host,
        port=args.port,
        shutdown_timeout_s=args.shutdown_timeout,
        keys=keys,
        guard_all=args.guard_all,
        limits=Limits(
            max_body_bytes=int(args.max_body_mib * MIB),
            max_queued_requests=args.max_queued_requests,
            max_unread_tokens=args.max_unread_tokens,
            stall_timeout_s=args.stall_timeout,
            max_connections=args.max_connections,
        ),
        cors_origins=tuple(args.cors_origin or ()),
        engine_restarts=args.engine_restarts,
        otlp_endpoint=None if args.otlp_endpoint is None else checked_endpoint(args.otlp_endpoint),
        batches=batch_settings(args),
        log_level=args.log_level,
        log_format=args.log_format,
    )


def _keys(given: Sequence[str], files: Sequence[Path], classes: Sequence[ClassSpec]) -> KeyRing | None:
    if not given and not files:
        return None
    if any(not key.strip() for key in given):
        raise ValueError("--api-key is empty; give a key, or leave the flag away")
    keys = [ApiKey(name=f"--api-key {i}", sha256=digest_of(key.strip())) for i, key in enumerate(given, 1)]
    for file in files:
        keys += read_key_file(file)
    for key in keys:
        if key.tier is not None:
            try:
                class_of_tier(key.tier, classes)
            except ApiError as error:
                raise ValueError(f"--api-key-file: key {key.name!r}: {error}") from None
    if not keys:
        raise ValueError("--api-key-file: there is no key in it, so nobody could call; add one")
    return KeyRing(keys)

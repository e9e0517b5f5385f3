"""The command line of ``python -m omniserve.server``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omniserve.server.batches.settings import BatchSettings, add_batch_flags, batch_settings
from omniserve.server.engine_flags import add_engine_flags, config_from, integer, number, positive
from omniserve.server.loading import BUILTIN_MODEL_NAME, EngineLoader, builtin_model_path

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
    engine_restarts: int = 3
    """How often in a row a dead engine is started again; 0: its death ends the server."""
    log_level: str = "info"
    batches: BatchSettings = dataclasses.field(default_factory=BatchSettings)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its defaults for the engine are EngineConfig's."""
    parser = argparse.ArgumentParser(
        prog="python -m omniserve.server", description="Serve a model behind OpenAI's API, for classes of requests."
    )
    add_engine_flags(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: as --model)")
    profile = parser.add_mutually_exclusive_group()
    profile.add_argument("--profile", metavar="FILE", help="latency profile (default: the cached one, or made now)")
    profile.add_argument("--no-profile", action="store_true", help="predict no latencies: objectives are not enforced")
    parser.add_argument(
        "--profile-time-limit",
        type=positive,
        default=30.0,
        metavar="SECONDS",
        help="how long the start may measure if there is no profile yet (default: %(default)s)",
    )
    add_batch_flags(parser)
    server = {field.name: field.default for field in dataclasses.fields(ServerOptions)}
    parser.add_argument("--host", default=server["host"], help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=integer(0), default=server["port"], help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=number,
        default=server["shutdown_timeout_s"],
        help="seconds that running requests may go on after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-restarts",
        type=integer(0),
        default=server["engine_restarts"],
        metavar="N",
        help="how often in a row an engine that died is started again; 0 ends the server (default: %(default)s)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=server["log_level"])
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> tuple[ServerOptions, EngineLoader]:
    """Read the command line; a bad flag ends the program with status 2 and a message."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.port > 65535:
        parser.error(f"argument --port: must be <= 65535, got {args.port}")
    try:
        config = config_from(args)
        model = builtin_model_path() if args.model is None else args.model
    except ValueError as error:
        parser.error(str(error))
    options = ServerOptions(
        tokenizer=model,
        model_name=args.served_model_name or args.model or BUILTIN_MODEL_NAME,
        host=args.host,
        port=args.port,
        shutdown_timeout_s=args.shutdown_timeout,
        engine_restarts=args.engine_restarts,
        log_level=args.log_level,
        batches=batch_settings(args),
    )
    loader = EngineLoader(
        model=model,
        dtype=args.dtype,
        device=args.device,
        config=config,
        profile=None if args.profile is None else Path(args.profile),
        profile_time_limit_s=args.profile_time_limit,
        with_profile=not args.no_profile,
    )
    return options, loader

"""The command line of an engine on a machine of its own, which a server on another one uses."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from omniserve.core.arguments import ArgumentParser
from omniserve.core.logs import add_log_flags, set_up_logs
from omniserve.launch.dataclass_flags import positive
from omniserve.launch.flags import add_engine_flags, add_profile_flag, config_from, model_from, profile_from
from omniserve.launch.loading import EngineLoader
from omniserve.server.engines.agent import EngineServer
from omniserve.server.engines.curve import ENGINE, CurveKeys, checked_address, read_keys


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = ArgumentParser(
        prog="python -m omniserve.server.engines",
        allow_abbrev=False,  # Ray gives it the server's flags, of which it takes those that it knows
        description="Be an engine of a server on another machine. The model and --class must be those of the server.",
    )
    parser.add_argument(
        "--listen",
        default="tcp://127.0.0.1:7201",
        metavar="ADDRESS",
        help="address of this machine that the server connects to (default: %(default)s)",
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FOLDER",
        help="with engine.key_secret and server.key, from 'omniserve engines keys'; needed where other machines can "
        "connect",
    )
    parser.add_argument(
        "--heartbeat",
        type=positive,
        default=20.0,
        metavar="SECONDS",
        help="without a word of the server or of the engine's process, after which it is taken for dead (default: 20)",
    )
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="times in a row that the engine is started again"
    )
    add_log_flags(parser)
    add_profile_flag(parser)
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as an engine until a signal ends it; return the exit status."""
    parser = build_parser()
    args = parser.parse_args(_with_model_flag(list(sys.argv[1:] if arguments is None else arguments)))
    set_up_logs(args.log_level, args.log_format)
    try:
        keys = None if args.keys is None else read_keys(args.keys, ENGINE)
        checked_address(args.listen, keys, what="--listen")
        return asyncio.run(serve(args, loader_from(args), keys))
    except (ValueError, OSError, zmq.ZMQError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _with_model_flag(arguments: list[str]) -> list[str]:
    return ["--model", *arguments] if arguments and not arguments[0].startswith("-") else arguments


def loader_from(args: argparse.Namespace) -> EngineLoader:
    """Return what makes the engine that the flags ask for.

    Raises:
        ValueError: A flag's value does not fit.
    """
    profile, with_profile = profile_from(args)
    return EngineLoader(
        model=model_from(args),
        dtype=args.dtype,
        device=args.device,
        config=config_from(args),
        profile=profile,
        with_profile=with_profile,
        quantize=args.quantize,
        serves=True,
    )


async def serve(args: argparse.Namespace, loader: EngineLoader, keys: CurveKeys | None) -> int:
    """Serve until a signal comes, or the engine has died too often; return the exit status.

    Raises:
        zmq.ZMQError: The address cannot be used.
    """
    server = EngineServer(
        loader,
        args.listen,
        keys,
        heartbeat_s=args.heartbeat,
        max_restarts=args.restarts,
        log_level=args.log_level,
        log_format=args.log_format,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    return await server.run()

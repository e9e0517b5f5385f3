"""The command line of ``python -m omniserve.server``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omniserve.launch.flags import add_engine_flags, config_from, flag_text
from omniserve.launch.loading import BUILTIN_MODEL_NAME, EngineLoader, builtin_model_path
from omniserve.server.server_flags import ServerOptions, add_server_flags, options_from
from omniserve.server.settings import settings_parser, settings_text


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its defaults for the engine are EngineConfig's."""
    parser = settings_parser(
        prog="python -m omniserve.server", description="Serve a model behind OpenAI's API, for classes of requests."
    )
    add_engine_flags(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: as --model)")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="latency profile (default: the cached one, or made now); none: no latency is predicted, and no objective "
        "enforced",
    )
    add_server_flags(parser)
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> tuple[ServerOptions, EngineLoader]:
    """Read the command line, the environment and the file of settings.

    A bad one ends the program with status 2 and a message, ``--print-config`` with status 0 and the settings.
    """
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        config = config_from(args)
        model = builtin_model_path() if args.model is None else args.model
        name = args.served_model_name or args.model or BUILTIN_MODEL_NAME
        options = options_from(args, tokenizer=model, model_name=name, classes=config.classes)
    except ValueError as error:
        parser.error(str(error))
    if args.print_config:
        print(settings_text(parser, args, flag_text), end="")
        parser.exit()
    loader = EngineLoader(
        model=model,
        dtype=args.dtype,
        device=args.device,
        config=config,
        profile=None if args.profile in (None, "none") else Path(args.profile),
        profile_time_limit_s=options.limits.profile_time_limit_s,
        with_profile=args.profile != "none",
    )
    return options, loader

"""Run the server with the fake engine; the flags are the real server's and a few more."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fake_engine import FakeLoader

    from omniserve.server.options import ServerOptions

if __name__ in ("__main__", "__mp_main__"):  # the engine's process imports this module too
    # Of a start torch would take the most time, for tokenizers that do without; the fake engine computes nothing.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is missing


def read_flags(flags: list[str]) -> tuple[ServerOptions, FakeLoader]:
    """Return what a server with these flags is made of."""
    import dataclasses
    from pathlib import Path

    from fake_engine import FakeLoader

    from omniserve.launch.flags import config_from
    from omniserve.server.cli import build_parser, options_from

    parser = build_parser()
    parser.set_defaults(port=0)
    parser.add_argument("--tokenizer")
    parser.add_argument("--fail", help="the engine does not start, with this message")
    parser.add_argument("--name", nargs="+", default=["fake"], help="of the model")
    parser.add_argument("--work-log", help="file that gets a line for each prompt that the engine gets")
    parser.add_argument("--fail-while", type=Path, help="the engine does not start while there is this file")
    parser.add_argument("--no-faults", action="store_true", help="no prompt causes a fault: any may be sent")
    args = parser.parse_args(flags)
    args.limit = [("engine_restarts", "0"), *(args.limit or ())]
    config = dataclasses.replace(config_from(args), device_kv_bytes=4 << 20, block_size=16)
    options = options_from(args, tokenizer=args.tokenizer, model_names=tuple(args.name), config=config)
    loader = FakeLoader(
        config=config,
        fail=args.fail,
        fail_while=args.fail_while,
        work_log=args.work_log,
        with_faults=not args.no_faults,
    )
    return options, loader


if __name__ == "__main__":
    import importlib
    import json

    from omniserve.server.serve import run

    # Other values for constants of the server, by module and name.
    for place, value in json.loads(os.environ.get("FAKE_CONSTANTS", "{}")).items():
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, value)
    sys.exit(run(*read_flags(sys.argv[1:])))

"""The command line of a prefill engine: it computes prompts for engines that decode, and sends them the KV.

    python -m omniserve.prefill --listen HOST:PORT --secret-file FILE --model PATH_OR_HUB_ID

The model must be the same as that of the engines, and so must --block-size, the names of classes, and the sizes of
tensor and pipeline parallel.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from omniserve.core import link
from omniserve.core.arguments import ArgumentParser
from omniserve.core.errors import OmniServeError
from omniserve.core.logs import add_log_flags, set_up_logs
from omniserve.launch.dataclass_flags import positive
from omniserve.launch.flags import add_engine_flags, add_profile_flag, config_from, model_from, profile_from
from omniserve.launch.loading import EngineLoader

if TYPE_CHECKING:
    from omniserve.prefill.server import PrefillServer


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = ArgumentParser(
        prog="python -m omniserve.prefill",
        allow_abbrev=False,  # Ray gives it the server's flags, of which it takes those that it knows
        description="Compute prompts for engines that decode, and send them the KV. The model, --block-size, "
        "names of classes, --tensor-parallel-size and --pipeline-parallel-size must be those of the engines.",
    )
    parser.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="address of this machine that engines connect to"
    )
    parser.add_argument(
        "--secret-file",
        required=True,
        metavar="PATH",
        help="the same secret as the engines' --prefill-secret-file, 16 characters or more",
    )
    parser.add_argument(
        "--profile-time-limit", type=positive, default=30.0, metavar="SECONDS", help="of measuring (default: 30)"
    )
    add_log_flags(parser)
    add_profile_flag(parser)
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as a prefill engine until a signal ends it; return the exit status."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    set_up_logs(args.log_level, args.log_format)
    try:
        run(args, link.read_secret(args.secret_file), link.host_and_port(args.listen), _end_by_signals)
    except (ValueError, OSError, OmniServeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _end_by_signals(server: PrefillServer) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        server.close()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    print("listens at {}:{}".format(*server.address), flush=True)


def run(
    args: argparse.Namespace, secret: bytes, address: tuple[str, int], on_start: Callable[[PrefillServer], None]
) -> None:
    """Make an engine of flags, and serve as a prefill engine; ``on_start`` is called when it listens.

    Raises:
        OSError: There is no such model, or the address cannot be used.
        ValueError: The settings do not fit the model or a prefill engine.
        UnsupportedModelError: The model is not supported.
    """
    config = config_from(args)
    if config.prefill.prefill_engines:
        raise ValueError("a prefill engine asks no others: leave out --prefill-engines")
    config = dataclasses.replace(config, prefill=dataclasses.replace(config.prefill, is_prefill_engine=True))
    if config.execution.async_steps is None:  # a step that is launched ahead would delay the KV of the one before it
        config = dataclasses.replace(config, execution=dataclasses.replace(config.execution, async_steps=False))
    model = model_from(args)
    profile, with_profile = profile_from(args)
    loader = EngineLoader(
        model=model,
        dtype=args.dtype,
        device=args.device,
        config=config,
        profile=profile,
        with_profile=with_profile,
        quantize=args.quantize,
        profile_time_limit_s=args.profile_time_limit,
    )
    engine = loader(lambda message: logging.getLogger("omniserve.prefill").info("%s", message))
    # These import torch, for which --help need not wait.
    from omniserve.layers.kv_fingerprint import kv_fingerprint
    from omniserve.prefill.server import PrefillServer

    with engine:
        fingerprint = kv_fingerprint(engine.model.family.model, config)
        server = PrefillServer(
            engine, fingerprint=fingerprint, secret=secret, secret_file=args.secret_file, address=address
        )
        on_start(server)
        server.run()

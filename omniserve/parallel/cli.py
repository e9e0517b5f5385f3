"""The command line of a rank that joins an engine; torchrun, Ray or a shell may start it, one for each device."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from omniserve.core import link, numa
from omniserve.core.arguments import ArgumentParser
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.logs import add_log_flags, set_up_logs
from omniserve.layers.model_classes import import_model_classes
from omniserve.parallel.shares import pin_to_share, place_joined

_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
SECRET_VARIABLE = "OMNISERVE_RANK_SECRET"


def _numa(text: str) -> str:
    """Read where a rank is to be; an argparse type."""
    if text not in ("auto", "off") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be auto, off or the number of a NUMA node, got {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="python -m omniserve.rank", description=__doc__)
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="the engine's --rank-listen")
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="the same secret as the engine's --rank-secret-file, 16 characters or more",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=int(os.environ["RANK"]) if os.environ.get("RANK", "0") != "0" else None,
        help="which rank this is, from 1; by default torchrun's RANK, or the first that is free",
    )
    parser.add_argument("--once", action="store_true", help="end when the engine ends; else join its next one")
    parser.add_argument(
        "--numa",
        type=_numa,
        default="auto",
        metavar="NODE",
        help="the NUMA node whose cores and memory this rank has; off: any; auto: with torchrun's LOCAL_RANK and "
        "LOCAL_WORLD_SIZE, and no GPU, ranks are spread over the nodes (default: auto)",
    )
    parser.add_argument("--share-cores", type=int, metavar="RANKS", help=argparse.SUPPRESS)
    parser.add_argument("--engines", type=int, default=1, help=argparse.SUPPRESS)
    add_log_flags(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as a rank; return the exit status."""
    args = _parser().parse_args(arguments)
    set_up_logs(args.log_level, args.log_format)
    logger = logging.getLogger("omniserve.rank")
    try:
        address = link.host_and_port(args.join)
        if args.secret_file is not None:
            secret = link.read_secret(args.secret_file)
        elif SECRET_VARIABLE in os.environ:
            secret = os.environ.pop(SECRET_VARIABLE).encode()
        else:
            raise ValueError("give --secret-file, the file that the engine's --rank-secret-file has")
        if args.numa.isdecimal():
            numa.node_numbered(int(args.numa), os.sched_getaffinity(0))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.once:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the engine, which ends this process
    try:
        join(
            address, secret, rank=args.rank, once=args.once, share_cores=args.share_cores, num_engines=args.engines,
            where=args.numa,
        )  # fmt: skip
    except PeerRefused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (PeerLost, OSError) as error:
        logger.error("%s", error)
        if args.once:
            return 1
    if not args.once:
        time.sleep(_FIRST_PAUSE_S)
        # A new process begins with nothing left of this one's collectives, and with all cores.
        numa.release()
        os.environ[SECRET_VARIABLE] = secret.decode()
        os.execv(sys.executable, [sys.executable, "-m", "omniserve.rank", *(arguments or sys.argv[1:])])
    return 0


def join(
    address: tuple[str, int],
    secret: bytes,
    *,
    rank: int | None = None,
    once: bool = False,
    share_cores: int | None = None,
    num_engines: int = 1,
    where: str = "auto",
) -> None:
    """Join an engine, and serve as its rank until it ends; wait for it first, unless ``once``.

    Args:
        address: The engine's.
        secret: The engine's.
        rank: Which one; None: the first that is free.
        once: Do not wait for the engine.
        share_cores: The number of ranks that share the cores of this process, all of this engine; None: not known.
        num_engines: Engines that share this machine's CPU quota.
        where: A NUMA node, ``auto`` or ``off``.

    Raises:
        PeerRefused: It refuses this process.
        PeerLost, OSError: It is gone.
        ValueError: There is no such node.
    """
    if share_cores:
        assert rank is not None
        pin_to_share(rank, share_cores, where, num_engines=num_engines)
    else:
        place_joined(where)
    import_model_classes()
    from omniserve.parallel.follow import follow  # imports torch, which takes seconds

    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            joined = link.connect(address, secret, _CONNECT_S, "rank 0")
            break
        except OSError as error:
            if once:
                raise
            logging.getLogger("omniserve.rank").info("no engine listens at %s:%d yet (%s)", *address, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    follow(joined, rank)

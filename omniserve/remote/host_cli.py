"""The command line of a CPU host on the network; a shell, a service manager or Ray may start it, one a machine."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from omniserve.core import link
from omniserve.core.arguments import ArgumentParser
from omniserve.core.config import CPU_HOST_SECRET_VARIABLE
from omniserve.core.logs import add_log_flags, set_up_logs


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="python -m omniserve.host", description=__doc__)
    parser.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="address of this machine that engines connect to"
    )
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="the same secret as the engine's --cpu-host-secret-file, 16 characters or more",
    )
    parser.add_argument("--kv-gib", type=float, default=1.0, metavar="GIB", help="memory for KV (default: 1)")
    parser.add_argument("--threads", type=int, metavar="THREADS", help="threads that attend (default: all cores)")
    parser.add_argument(
        "--pin", action="store_true", help="pin each thread to a core of its own, of those this process may use"
    )
    add_log_flags(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as a CPU host until a signal ends it; return the exit status."""
    args = _parser().parse_args(arguments)
    set_up_logs(args.log_level, args.log_format)
    cores = sorted(os.sched_getaffinity(0))
    try:
        address = link.host_and_port(args.listen)
        if args.secret_file is not None:
            secret = link.read_secret(args.secret_file)
        elif CPU_HOST_SECRET_VARIABLE in os.environ:
            secret = os.environ[CPU_HOST_SECRET_VARIABLE].encode()
        else:
            raise ValueError("give --secret-file, the file that the engine's --cpu-host-secret-file has")
        if not args.kv_gib > 0:
            raise ValueError(f"--kv-gib must be > 0, got {args.kv_gib:g}")
        if args.threads is not None and args.threads < 1:
            raise ValueError(f"--threads must be >= 1, got {args.threads}")
        from omniserve.host.cores import available_cores, quota_note  # imports torch, which takes seconds
        from omniserve.remote.host_server import HostServer

        num_threads = available_cores() if args.threads is None else args.threads
        if args.threads is None and (note := quota_note()):
            logging.getLogger("omniserve.host").info("%s", note)
        server = HostServer(
            secret=secret,
            kv_bytes=int(args.kv_gib * (1 << 30)),
            num_threads=num_threads,
            cores=tuple(cores) if args.pin else None,
            address=address,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, end)
        server.start()
        print("listens at {}:{}".format(*server.address), flush=True)
        server.wait()
    except KeyboardInterrupt:
        server.close()
        return 0
    return 1  # no engine can connect any more

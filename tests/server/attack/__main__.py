"""Attack a server with the built-in model for longer than tests may take, and say what came of it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

sys.path.append(str(Path(__file__).parents[1]))

from running import RunningServer

from tests.server.attack.bodies import check_answer, requests
from tests.server.attack.load import send_all
from tests.server.attack.processes import held
from tests.server.attack.real import FLAGS, overload
from tests.server.attack.real import requests as right_requests
from tests.server.attack.sockets import connect


def run_overload(server: Any, args: argparse.Namespace) -> str:
    return str(asyncio.run(overload(server, factor=args.factor, seconds=args.seconds, capacity_s=5)))


def run_connections(server: Any, args: argparse.Namespace) -> str:
    before = held(server)
    idle = [connect(server) for _ in range(args.connections)]
    with_idle, told = held(server), []
    for _ in range(3):
        tally = asyncio.run(send_all(server.url, itertools.islice(right_requests(), args.connections)))
        tally.check(args.connections)
        server.wait_until_free()
        told.append(f"{dict(tally.outcomes)}, then {held(server)}")
    for connection in idle:
        connection.close()
    return f"before {before}; with {args.connections} idle {with_idle}; floods: {'; '.join(told)}; after {held(server)}"


def run_bodies(server: Any, args: argparse.Namespace) -> str:
    with server.http() as http:

        @settings(max_examples=args.examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @seed(args.seed)
        @given(request=requests())
        def attack(request: tuple[str, bytes]) -> None:
            path, body = request
            check_answer(http.post(path, content=body, headers={"content-type": "application/json"}))

        attack()
    server.wait_until_free()
    return f"{args.examples} bodies (seed {args.seed}): each was answered or refused"


ATTACKS = {"overload": run_overload, "connections": run_connections, "bodies": run_bodies}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.attack", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"{', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--factor", type=float, default=10, help="of an overload (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="that it lasts (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--examples", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    if unknown := [name for name in args.attacks if name not in ATTACKS]:
        parser.error(f"unknown attacks {', '.join(unknown)}; known: {', '.join(ATTACKS)}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for name in args.attacks or ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            server = RunningServer(
                [sys.executable, "-m", "omniserve.server", *FLAGS, *flags], own_group=False, XDG_DATA_HOME=folder
            )
            try:
                server.wait_until_ready()
                print(f"{name}: {ATTACKS[name](server, args)}", flush=True)
                assert server.stop() == 0
                assert not [line for line in server.log if "Traceback" in line], "".join(server.log)
            finally:
                if server.process.poll() is None:
                    server.process.kill()


if __name__ == "__main__":
    main()

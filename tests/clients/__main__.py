"""Install real clients, each in an environment of its own, and try them on a served model.

Ends with a table: works, does not work (with the client's own error), or not installed (with the installer's). The exit
status is 1 if a client that is expected to work does not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.common.terminal import table
from tests.clients.install import read_clients
from tests.clients.trials import scripted_server, try_client

_INSTALL_TIMEOUT_S = 1800.0
_TRIAL_TIMEOUT_S = 900.0


def main() -> int:
    """Try the clients that the command line names."""
    clients = read_clients()
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help="those to try (default: all of --list)")
    parser.add_argument("--list", action="store_true", help="show the clients and their packages, and end")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/clients"), help="folder of the environments (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the model, the server's log and those of the clients")
    args = parser.parse_args()
    if unknown := [name for name in args.clients if name not in clients]:
        parser.error(f"unknown clients {', '.join(unknown)}; known: {', '.join(clients)}")
    if args.list:
        for client in clients.values():
            print(f"{client.name:14} {client.left_out or ' '.join([*client.packages, *client.npm])}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="omniserve-clients-"))
    outcomes = []
    try:
        with scripted_server(folder) as (server, model_folder):
            for name in args.clients or clients:
                print(f"{name} ...", file=sys.stderr, flush=True)
                outcomes.append(
                    try_client(
                        clients[name],
                        server,
                        model_folder,
                        cache=args.cache,
                        folder=folder,
                        install_timeout_s=_INSTALL_TIMEOUT_S,
                        trial_timeout_s=_TRIAL_TIMEOUT_S,
                    )
                )
    finally:
        if args.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    print(table([("client", "version", "result", "checks, or why not"), *(outcome.row() for outcome in outcomes)]))
    return 0 if all(outcome.is_as_expected for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""``omniserve engines``: see and change the engines of a running server, by its ``/admin/engines``; make their keys."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from omniserve.core.arguments import ArgumentParser
from omniserve.server.engines.curve import make_keys

_TIMEOUT_S = 30.0
_POLL_S = 0.5
_COLUMNS = ("id", "address", "state", "num_requests", "calls", "restarts")


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="python -m omniserve.server.engines.admin_cli", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get("OMNISERVE_API_KEY", "none"), help="one with admin: true in the key file"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="show the engines")
    listing.add_argument("--json", action="store_true", help="all that is known, as JSON")
    adding = commands.add_parser("add", help="start an engine on the server's machine, or use one at an address")
    adding.add_argument("address", nargs="?", help="such as tcp://10.0.0.2:7201; it has to be allowed")
    for name, text in (
        ("drain", "give an engine no more calls"),
        ("resume", "give an engine that was drained calls again"),
        ("remove", "drain an engine, and end it when its requests have ended"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("id", type=int, help="the engine's number, as list shows it")
    command.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="that its requests have (default: 600)"
    )
    keys = commands.add_parser("keys", help="make keys for engines on other machines, and for servers that use them")
    keys.add_argument("folder", type=Path, help="a new one")
    for command in (adding, commands.choices["remove"]):
        command.add_argument("--wait", action="store_true", help="until that is done")
    return parser


class AdminError(Exception):
    """The server refused, or is not there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status."""
    args = _parser().parse_args(arguments)
    if args.command == "keys":
        return _make_keys(args.folder)
    headers = {"Authorization": f"Bearer {args.api_key}"}
    with httpx.Client(base_url=args.url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S) as http:
        try:
            _do(http, args)
        except AdminError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def _make_keys(folder: Path) -> int:
    try:
        make_keys(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"machines with engines need {folder}/engine.key_secret and server.key,")
    print(f"those with servers {folder}/server.key_secret and engine.key")
    return 0


def _do(http: httpx.Client, args: argparse.Namespace) -> None:
    match args.command:
        case "list":
            engines = _ask(http, "GET", "")["data"]
            print(json.dumps(engines, indent=2) if args.json else _table(engines))
        case "add":
            body = {} if args.address is None else {"address": args.address}
            engine = _ask(http, "POST", "", json=body)
            while args.wait and engine["state"] != "up":
                time.sleep(_POLL_S)
                engine = _find(http, engine["id"]) or {"id": engine["id"], "address": "", "state": "gone"}
                if engine["state"] in ("down", "gone"):
                    raise AdminError(f"engine {engine['id']} has not come: {engine.get('failure')}")
            print(_table([engine]))
        case "remove":
            leaving: dict[str, Any] | None = _ask(http, "DELETE", f"/{args.id}", params={"timeout_s": args.timeout})
            while args.wait and leaving is not None:
                time.sleep(_POLL_S)
                leaving = _find(http, args.id)
            print(f"engine {args.id} {'is leaving' if leaving is not None else 'has left'}")
        case action:
            print(_table([_ask(http, "POST", f"/{args.id}/{action}")]))


def _find(http: httpx.Client, number: int) -> dict[str, Any] | None:
    return next((engine for engine in _ask(http, "GET", "")["data"] if engine["id"] == number), None)


def _ask(http: httpx.Client, method: str, path: str, **content: Any) -> dict[str, Any]:
    try:
        response = http.request(method, f"/admin/engines{path}", **content)
    except httpx.HTTPError as error:
        raise AdminError(f"{http.base_url}: {error}; is the server there? see --url") from None
    try:
        answer: dict[str, Any] = response.json()
        if response.is_success:
            return answer
        raise AdminError(answer["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise AdminError(f"{response.request.url}: HTTP {response.status_code}") from None


def _table(engines: Sequence[dict[str, Any]]) -> str:
    rows = [_COLUMNS, *([str(engine.get(name, "")) for name in _COLUMNS] for engine in engines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failures = [f"engine {each['id']}: {each['failure']}" for each in engines if each.get("failure")]
    return "\n".join([*lines, *failures])


if __name__ == "__main__":
    sys.exit(main())

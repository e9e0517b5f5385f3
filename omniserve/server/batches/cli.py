"""``python -m omniserve.batch``: run a file of requests here, or send it to a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omniserve.server.batches.remote import RemoteBatches


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    from omniserve.launch.dataclass_flags import integer
    from omniserve.launch.flags import add_engine_flags
    from omniserve.server.answers import ENDPOINTS
    from omniserve.server.batches.settings import BatchSettings

    parser = argparse.ArgumentParser(
        prog="python -m omniserve.batch",
        description="Work through a file of requests, one JSON object a line, in the format of OpenAI's Batch API.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run a file here, without a server; again, to go on after a stop or a crash")
    run.add_argument("input", type=Path, metavar="INPUT.jsonl")
    _add_files(run)
    add_engine_flags(run)
    run.add_argument("--served-model-name", metavar="NAME", help="the model's name in the file (default: as --model)")
    concurrency = BatchSettings().concurrency
    run.add_argument(
        "--batch-concurrency",
        type=integer(1),
        default=concurrency,
        metavar="N",
        help="lines at a time (default: %(default)s)",
    )

    submit = commands.add_parser("submit", help="send a file to a server; prints the batch's id")
    submit.add_argument("input", type=Path, metavar="INPUT.jsonl")
    submit.add_argument("--completion-window", default="24h", help="like 90m, 24h, 7d (default: %(default)s)")
    for command in (run, submit):
        command.add_argument(
            "--endpoint", choices=list(ENDPOINTS), help="what the lines are for (default: as the first line says)"
        )

    status = commands.add_parser("status", help="print a batch")
    cancel = commands.add_parser("cancel", help="end a batch; what is done is kept")
    fetch = commands.add_parser("fetch", help="wait for the end of a batch and write its files")
    _add_files(fetch)
    for command in (status, cancel, fetch):
        command.add_argument("batch", metavar="BATCH_ID")
    for command in (submit, status, cancel, fetch):
        command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
        command.add_argument("--api-key", default="none", help="if the server asks for one")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status."""
    import logging

    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel("WARNING")
    parser = build_parser()
    args = parser.parse_args(arguments)
    return _run(parser, args) if args.command == "run" else _remote(parser, args)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    import asyncio

    from omniserve.launch.flags import config_from
    from omniserve.launch.loading import BUILTIN_MODEL_NAME, EngineLoader, builtin_model_path
    from omniserve.server.batches.offline import OfflineJob, run_offline
    from omniserve.server.batches.settings import BatchSettings
    from omniserve.server.cli import ServerOptions

    try:
        config = config_from(args)
        model = builtin_model_path() if args.model is None else args.model
    except ValueError as error:
        parser.error(str(error))
    endpoint = _endpoint(parser, args)
    options = ServerOptions(
        tokenizer=model,
        model_name=args.served_model_name or args.model or BUILTIN_MODEL_NAME,
        batches=BatchSettings(concurrency=args.batch_concurrency, max_lines=sys.maxsize),
        log_level="warning",
    )
    # Nothing here has an objective, so nothing has to be predicted.
    loader = EngineLoader(model=model, dtype=args.dtype, device=args.device, config=config, with_profile=False)
    job = OfflineJob(input=args.input, output=args.output, errors=_errors(args), endpoint=endpoint)
    return asyncio.run(run_offline(job, options, loader))


def _remote(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    import json

    from omniserve.server.batches.database import StorageError
    from omniserve.server.batches.remote import RemoteBatches, RemoteError

    batches = RemoteBatches(args.url, args.api_key)
    try:
        match args.command:
            case "submit":
                endpoint = _endpoint(parser, args)
                batch = batches.submit(args.input, endpoint=endpoint, completion_window=args.completion_window)
                print(batch["id"])
            case "status":
                print(json.dumps(batches.status(args.batch), indent=2))
            case "cancel":
                print(json.dumps(batches.cancel(args.batch), indent=2))
            case "fetch":
                return _fetch(batches.wait(args.batch, _show), batches, args)
        return 0
    except (RemoteError, StorageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _fetch(batch: dict[str, Any], batches: RemoteBatches, args: argparse.Namespace) -> int:
    batches.fetch(batch, args.output, _errors(args))
    for fault in (batch["errors"] or {"data": []})["data"]:
        print(f"line {fault['line']}: {fault['message']}", file=sys.stderr)
    return 0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 1


def _show(batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    print(f"{batch['status']}: {counts['completed']} + {counts['failed']} failed of {counts['total']}", file=sys.stderr)


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", type=Path, required=True, metavar="OUTPUT.jsonl", help="gets the answers")
    command.add_argument(
        "-e",
        "--errors",
        type=Path,
        metavar="ERRORS.jsonl",
        help="gets the lines that have an error instead (default: the output's name with .errors)",
    )


def _errors(args: argparse.Namespace) -> Path:
    return args.errors or args.output.with_suffix(".errors" + args.output.suffix)


def _endpoint(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the endpoint that was named, or that of the first line."""
    import json

    from omniserve.server.answers import ENDPOINTS

    if args.endpoint is not None:
        return str(args.endpoint)
    try:
        with args.input.open("rb") as file:
            url = json.loads(next(line for line in file if line.strip()))["url"]
    except OSError as error:
        parser.error(f"cannot read {args.input}: {error.strerror}")
    except (ValueError, TypeError, KeyError, StopIteration):
        parser.error(f"the first line of {args.input} is no request with a url")
    if url not in ENDPOINTS:
        parser.error(f"the first line of {args.input} is for {url!r}; there are {' and '.join(ENDPOINTS)}")
    return str(url)

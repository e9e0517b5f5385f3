"""``python -m omniserve.batch``: run a file of requests here, or send it to a server."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from omniserve.core.arguments import ArgumentParser
from omniserve.core.logs import set_up_logs
from omniserve.launch.dataclass_flags import add_field_flags, integer
from omniserve.launch.flags import add_engine_flags, config_from, loras_from, model_from
from omniserve.server.access.limits import Limits
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.endpoints import ENDPOINTS
from omniserve.server.batches.files import FileFolder
from omniserve.server.fields import other_encoding, read_json, without_marks
from omniserve.server.options import ServerOptions

_POLL_S = 2.0
_TIMEOUT_S = 60.0
# So long a server that was there may give no answer, or say that it cannot, before waiting for a batch ends.
_PATIENCE_S = 600.0
_LONGEST_PAUSE_S = 60.0
_FINAL = ("completed", "failed", "expired", "cancelled")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = ArgumentParser(
        prog="python -m omniserve.batch",
        description="Work through a file of requests, one JSON object a line, in the format of OpenAI's Batch API.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a file here, without a server; again, to go on after a stop or a crash")
    submit = commands.add_parser("submit", help="send a file to a server; prints the batch's id")
    status = commands.add_parser("status", help="print a batch")
    cancel = commands.add_parser("cancel", help="end a batch; what is done is kept")
    fetch = commands.add_parser("fetch", help="wait for the end of a batch and write its files")

    for command in (run, submit):
        command.add_argument("input", type=Path, metavar="INPUT.jsonl")
        command.add_argument(
            "--endpoint", choices=list(ENDPOINTS), help="what the lines are for (default: as the first line says)"
        )
    for command in (run, fetch):
        command.add_argument(
            "-o", "--output", type=Path, required=True, metavar="OUTPUT.jsonl", help="gets the answers"
        )
        command.add_argument(
            "-e",
            "--errors",
            type=Path,
            metavar="ERRORS.jsonl",
            help="gets the lines that have an error instead (default: the output's name with .errors)",
        )
    for command in (status, cancel, fetch):
        command.add_argument("batch", metavar="BATCH_ID")
    for command in (submit, status, cancel, fetch):
        command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
        command.add_argument("--api-key", default="none", help="if the server asks for one")
    submit.add_argument("--completion-window", default="24h", help="like 90m, 24h, 7d (default: %(default)s)")
    add_engine_flags(run)
    run.add_argument("--served-model-name", metavar="NAME", help="the model's name in the file (default: as --model)")
    add_field_flags(run, ServerOptions, ("generation_config",))
    run.add_argument(
        "--batch-concurrency",
        type=integer(1),
        default=Limits.batch_concurrency,
        metavar="N",
        help="lines at a time (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status."""
    set_up_logs("info", "text", text="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.command in ("run", "fetch") and args.errors is None:
        args.errors = args.output.with_suffix(".errors" + args.output.suffix)
    if args.command in ("run", "submit") and args.endpoint is None:
        try:
            args.endpoint = _endpoint_in(args.input)
        except ValueError as error:
            parser.error(str(error))
    if args.command == "run":
        return _run(parser, args)
    try:
        return _ask_server(RemoteBatches(args.url, args.api_key), args)
    except (RemoteError, StorageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _endpoint_in(path: Path) -> str:
    """Return the endpoint of the first line of an input file.

    Raises:
        ValueError: The file cannot be read, or does not say.
    """
    try:
        with path.open("rb") as file:
            first = next((line for line in file if without_marks(line).strip()), b"")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if (encoding := other_encoding(first)) is not None:
        raise ValueError(f"{path} is {encoding}; save it as UTF-8")
    try:
        url = read_json(first)["url"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"the first line of {path} is no request with a url") from None
    if url not in ENDPOINTS:
        raise ValueError(f"the first line of {path} is for {url!r}; there are {' and '.join(ENDPOINTS)}")
    return str(url)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    # Only here: the other commands need no engine.
    import asyncio

    from omniserve.launch.loading import EngineLoader
    from omniserve.launch.models import BUILTIN_MODEL_NAME
    from omniserve.server.batches.offline import OfflineJob, run_offline

    try:
        config = config_from(args)
        model = model_from(args)
        loras = loras_from(args)
    except ValueError as error:
        parser.error(str(error))
    options = ServerOptions(
        tokenizer=model,
        trust_remote_code=config.execution.trust_remote_code,
        model_names=(args.served_model_name or args.model or BUILTIN_MODEL_NAME,),
        loras=loras,
        generation_config=args.generation_config,
        limits=Limits(batch_concurrency=args.batch_concurrency, batch_max_lines=sys.maxsize),
        log_level="warning",
    )
    # Nothing here has an objective, so nothing has to be predicted.
    loader = EngineLoader(model=model, dtype=args.dtype, device=args.device, config=config, with_profile=False,
                          quantize=args.quantize)  # fmt: skip
    job = OfflineJob(input=args.input, output=args.output, errors=args.errors, endpoint=args.endpoint)
    return asyncio.run(run_offline(job, options, loader))


class RemoteError(Exception):
    """The server did not do what it was asked to; the message is its own.

    ``retry_after_s`` is for errors that may pass: when the server asks to be asked again, or 0.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RemoteBatches:
    """The batches of the server at a URL; all functions raise RemoteError if it refuses or is not there."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=f"{url.rstrip('/')}/v1", headers=headers, timeout=_TIMEOUT_S)

    def submit(self, path: Path, *, endpoint: str, completion_window: str) -> dict[str, Any]:
        """Upload an input file and make a batch of it; return the batch.

        Raises:
            OSError: The file cannot be read.
        """
        with path.open("rb") as file:
            upload = self.ask("POST", "/files", data={"purpose": "batch"}, files={"file": (path.name, file)})
        wanted = {"input_file_id": upload["id"], "endpoint": endpoint, "completion_window": completion_window}
        return self.ask("POST", "/batches", json=wanted)

    def wait(self, batch_id: str, on_progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Return a batch once it has ended; ``on_progress`` sees it now and then.

        A server that has answered once may be away for some minutes, to be started again for instance.
        """
        answered_s: float | None = None
        while True:
            pause_s = _POLL_S
            try:
                batch = self.ask("GET", f"/batches/{batch_id}")
            except RemoteError as error:
                is_away = answered_s is not None and time.monotonic() - answered_s <= _PATIENCE_S
                if error.retry_after_s is None or not is_away:
                    raise
                pause_s = min(max(error.retry_after_s, _POLL_S), _LONGEST_PAUSE_S)
            else:
                answered_s = time.monotonic()
                on_progress(batch)
                if batch["status"] in _FINAL:
                    return batch
            time.sleep(pause_s)

    def fetch(self, file_id: str, target: Path) -> None:
        """Write a file of the server's; it is complete or not there.

        Raises:
            StorageError: It cannot be written.
        """
        try:
            with self._http.stream("GET", f"/files/{file_id}/content") as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise RemoteError(_message(response))
                FileFolder(target.parent.absolute()).write(target.name, response.iter_bytes())
        except httpx.HTTPError as error:
            raise RemoteError(f"{self._http.base_url}: {error}") from None

    def ask(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Return the object that the server answers."""
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            message = f"{self._http.base_url}: {error}; is the server there? see --url"
            raise RemoteError(message, 0.0 if isinstance(error, httpx.TransportError) else None) from None
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            after = response.headers.get("retry-after", "")  # of which a date is not understood
            raise RemoteError(_message(response), float(after) if after.isascii() and after.isdigit() else 0.0)
        if not response.is_success:
            raise RemoteError(_message(response))
        found: dict[str, Any] = response.json()
        return found


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url}: HTTP {response.status_code}"


def _ask_server(batches: RemoteBatches, args: argparse.Namespace) -> int:
    match args.command:
        case "submit":
            batch = batches.submit(args.input, endpoint=args.endpoint, completion_window=args.completion_window)
            print(batch["id"])
        case "status":
            print(json.dumps(batches.ask("GET", f"/batches/{args.batch}"), indent=2))
        case "cancel":
            print(json.dumps(batches.ask("POST", f"/batches/{args.batch}/cancel"), indent=2))
        case "fetch":
            batch = batches.wait(args.batch, _show)
            for file_id, target in ((batch["output_file_id"], args.output), (batch["error_file_id"], args.errors)):
                if file_id is not None:
                    batches.fetch(file_id, target)
            for fault in (batch["errors"] or {"data": []})["data"]:
                print(f"line {fault['line']}: {fault['message']}", file=sys.stderr)
            return 0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 1
    return 0


def _show(batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    print(f"{batch['status']}: {counts['completed']} + {counts['failed']} failed of {counts['total']}", file=sys.stderr)

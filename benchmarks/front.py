"""What a request costs the front: CPU time of the API process, with an engine that computes nothing.

python -m benchmarks.front --record benchmarks/results/front.json
python -m benchmarks.front requests --trees /path/to/another/checkout .
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.common.cases import Benchmark, Trials
from benchmarks.common.server import ServerProcess
from omniserve.server.workers.process import PROCESS_NAME
from tests.server.tokenizers_for_tests import byte_level_tokenizer

FRONT = Benchmark("front")
ROOT = Path(__file__).resolve().parents[1]
_QUESTION = "The quick brown fox jumps over the lazy dog. A list is a mutable sequence, a tuple is not. " * 2


@FRONT.case(
    trees=([str(ROOT)], "checkouts to compare, the first with the others"), requests=400, concurrency=8, tokens=64,
    repeats=9, tiny={"requests": 4, "concurrency": 2, "tokens": 4, "repeats": 1},
)  # fmt: skip
def requests(args: argparse.Namespace) -> Trials:
    """What a chat costs the API process in CPU time, its answer as a whole and streamed.

    Milliseconds of all threads of the process a request, over connections that stay open, with an engine in its own
    process that gives each request a token a millisecond. Checkouts take turns.
    """
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="omniserve-front-")))
        byte_level_tokenizer().save_pretrained(folder)
        servers = {tree: running.enter_context(_serving(Path(tree), folder, i)) for i, tree in enumerate(args.trees)}
        for server in servers.values():
            server.wait_until_healthy()
        for label, is_streamed in (("plain", False), ("streamed", True)):
            yield (
                f"{label}, {args.tokens} tokens",
                {tree: functools.partial(_cost, server, args, is_streamed) for tree, server in servers.items()},
            )


@FRONT.case(
    processes=[1, 2], requests=400, concurrency=8, tokens=64, repeats=9,
    tiny={"requests": 4, "concurrency": 2, "tokens": 4, "repeats": 1},
)  # fmt: skip
def processes(args: argparse.Namespace) -> Trials:
    """What a chat costs the owner of the engines and the API workers, by ``--api-processes``.

    Milliseconds of CPU time a request, as in ``requests``. There is one owner, however many workers there are: what it
    takes bounds what they can bring together.
    """
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="omniserve-front-")))
        byte_level_tokenizer().save_pretrained(folder)
        servers = {
            str(count): running.enter_context(_serving(ROOT, folder, count, "--api-processes", str(count)))
            for count in args.processes
        }
        for server in servers.values():
            server.wait_until_healthy()
        for label, is_streamed in (("plain", False), ("streamed", True)):
            yield (
                f"{label}, {args.tokens} tokens",
                {count: functools.partial(_shares, server, args, is_streamed) for count, server in servers.items()},
            )


def _shares(server: ServerProcess, args: argparse.Namespace, is_streamed: bool) -> dict[str, float]:
    owner = server.group
    children = Path(f"/proc/{owner}/task/{owner}/children").read_text().split()
    workers = [int(child) for child in children if Path(f"/proc/{child}/comm").read_text().strip() == PROCESS_NAME]
    before_s = [cpu_s(process) for process in (owner, *workers)]
    asyncio.run(ask(server.base_url, args.requests, args.concurrency, args.tokens, is_streamed=is_streamed))
    used_s = [cpu_s(process) - was_s for process, was_s in zip((owner, *workers), before_s, strict=True)]
    figures = {"owner, ms a request": 1e3 * used_s[0] / args.requests}
    return figures | ({"workers, ms a request": 1e3 * sum(used_s[1:]) / args.requests} if workers else {})


def _serving(tree: Path, folder: Path, number: int, *flags: str) -> ServerProcess:
    return ServerProcess(
        ["--tokenizer", str(folder), "--no-faults", "--limit", "response_days=0", *flags],
        folder / f"server-{number}.log",
        program=[sys.executable, str(tree / "tests" / "server" / "serve_fake.py")],
        environment={
            "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
            "XDG_DATA_HOME": str(folder / f"data-{number}"),
        },
    )


def _cost(server: ServerProcess, args: argparse.Namespace, is_streamed: bool) -> dict[str, float]:
    before_s = cpu_s(server.group)
    asyncio.run(ask(server.base_url, args.requests, args.concurrency, args.tokens, is_streamed=is_streamed))
    return {"ms a request": 1e3 * (cpu_s(server.group) - before_s) / args.requests}


def cpu_s(process: int) -> float:
    """Return the CPU seconds of all threads that a process has."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def ask(url: str, requests: int, concurrency: int, tokens: int, *, is_streamed: bool) -> None:
    """Send chats over as many connections as are to run at once, and read their answers.

    Raises:
        ConnectionError: An answer is no success.
    """
    fields = {
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_streamed,
    }
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    share, left = divmod(requests, concurrency)
    counts = [share + (i < left) for i in range(concurrency)]
    await asyncio.gather(*(_ask_in_turn(url, head.encode() + body, count) for count in counts if count))


async def _ask_in_turn(url: str, request: bytes, count: int) -> None:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 22)
    for _ in range(count):
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise ConnectionError(f"the server answered {head[:60]!r}")
        if b"content-length: " in head:
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


if __name__ == "__main__":
    sys.exit(FRONT.main())

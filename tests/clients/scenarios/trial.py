"""Parts that the clients' scripts share: the server's address, and checks that are reported one by one.

A script runs in its client's own environment, where neither omniserve nor the tests can be imported.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

URL = os.environ.get("TRIAL_URL", "http://127.0.0.1:8000")
"""The server's, without ``/v1``."""
BASE_URL = f"{URL}/v1"
MODEL = os.environ.get("TRIAL_MODEL", "scripted")
MODEL_FOLDER = os.environ.get("TRIAL_MODEL_FOLDER", "")
"""Folder of the model, whose tokenizer is for clients that count tokens themselves."""
TOO_LONG = "word " * 20000
"""A prompt of more tokens than the model has positions."""

_checks: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a check: a function, async or not, that raises if the client did not get what it should."""
    _checks.append(function)
    return function


def main() -> None:
    """Run all checks and write what became of each to the file that the environment names."""
    results = {}
    for function in _checks:
        print(f"== {function.__name__}", flush=True)
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
        except Exception as error:
            traceback.print_exc()
            results[function.__name__] = f"{type(error).__name__}: {error}".strip()
        else:
            results[function.__name__] = None
        # Now, for a script that is stopped later.
        Path(os.environ.get("TRIAL_REPORT", "/dev/stdout")).write_text(json.dumps(results))


@contextmanager
def best_effort(num_requests: int = 1) -> Iterator[None]:
    """Check that the server counts so many best-effort requests, or more, and no latency-sensitive one."""
    before = _requests()
    yield
    after = _requests()
    added = {name: after.get(name, 0) - before.get(name, 0) for name in ("LS", "BE")}
    assert added["BE"] >= num_requests and not added["LS"], f"requests by class: {added}"


@contextmanager
def beside_best_effort(num_streams: int = 4) -> Iterator[dict[str, float]]:
    """Keep best-effort requests going meanwhile, so many at once.

    Yields a mapping that at the end has what the server measured of latency-sensitive ones: the means ``ttft_ms`` and
    ``tpot_ms``, and ``num_best_effort``, how many others ended.
    """
    ended = threading.Event()
    body = {"model": MODEL, "prompt": "words " * 50, "max_tokens": 100, "ignore_eos": True, "service_tier": "flex"}
    request = urllib.request.Request(
        f"{BASE_URL}/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )

    def work() -> None:
        while not ended.is_set():
            with urllib.request.urlopen(request) as answer:
                answer.read()

    told: dict[str, float] = {}
    before, requests = _sums(), _requests()
    with ThreadPoolExecutor(num_streams) as threads:
        works = [threads.submit(work) for _ in range(num_streams)]
        try:
            yield told
        finally:
            after = _sums()
            told["num_best_effort"] = _requests().get("BE", 0) - requests.get("BE", 0)
            ended.set()
    for each in works:
        each.result()
    for name in ("ttft", "tpot"):
        total, count = ((after[f"{name}_{part}"] - before.get(f"{name}_{part}", 0.0)) for part in ("sum", "count"))
        told[f"{name}_ms"] = 1000 * total / count


def compare(ttft_ms: float, tpot_ms: float, server: Mapping[str, float]) -> None:
    """Print the ratios of a tool's mean times and the server's; check that there was other work."""
    print(f"TTFT: {ttft_ms / server['ttft_ms']:.3f} of the server's; TPOT: {tpot_ms / server['tpot_ms']:.3f} of it")
    assert server["num_best_effort"] > 0, server


def raised(kind: type[BaseException], text: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that a call raises one kind of exception, with a text in its message or body."""
    try:
        result = function(*args, **kwargs)
    except kind as error:
        told = f"{error} {getattr(error, 'body', '')}"
        assert text in told, f"{text!r} is not in {type(error).__name__}: {told}"
    else:
        raise AssertionError(f"no {kind.__name__}, but {result!r}")


def run(*command: str, **environment: str) -> str:
    """Run a program of the client's environment and return what it printed.

    Raises:
        RuntimeError: Its exit status is not 0; the message is the last line that tells an error.
    """
    program = str(Path(sys.executable).parent / command[0])
    done = subprocess.run(
        [program, *command[1:]], env=os.environ | environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["it printed nothing"]
        errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b", line)]
        raise RuntimeError(f"{command[0]} ended with status {done.returncode}: {(errors or lines)[-1]}")
    return done.stdout


def _metrics() -> str:
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        return answer.read().decode()


def _sums() -> dict[str, float]:
    """Return the sums and counts of the times of latency-sensitive requests."""
    found = re.findall(
        r'^omniserve_(ttft|tpot)_seconds_(sum|count)\{service_class="LS"\} (\S+)$', _metrics(), re.MULTILINE
    )
    return {f"{name}_{part}": float(value) for name, part, value in found}


def _requests() -> dict[str, float]:
    """Return how many requests of each class ended."""
    text = _metrics()
    counts: dict[str, float] = {}
    for name, value in re.findall(r'^omniserve_requests_total\{.*service_class="(\w+)".*\} (\S+)$', text, re.MULTILINE):
        counts[name] = counts.get(name, 0) + float(value)
    return counts

"""The process that the tests ask; see ``worker``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """Return a function that sends a request to the process and returns its answer; it starts one where none is."""
    process: subprocess.Popen[str] | None = None

    def send(**request: Any) -> dict[str, Any]:
        nonlocal process
        if process is None:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.streams.worker"], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        if line := process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        status, process = process.wait(), None
        return {"error": f"the process ended with {status}", "traceback": ""}

    yield send
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0

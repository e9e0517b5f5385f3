"""Servers to measure: a process of our own, or any other that is running already."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from benchmarks.common.sources import starts

STOP_TIMEOUT_S = 60.0
OMNISERVE = (sys.executable, "-m", "omniserve.server")
SETTLED = ("--limit", "profile_start_s=0")
"""Arguments with which it compiles and measures before it opens its port, not beside what it serves."""
BE_TOKENS = 'omniserve_output_tokens_total{service_class="BE"}'
HOST_TOKENS = "omniserve_host_output_tokens_total"


class ServerFailed(RuntimeError):
    """The server ended, did not become healthy, or failed a request of the load; the message ends with its log."""


class Server:
    """A server of another owner at ``url``, with or without ``/v1``; that it is gone shows in a failed request."""

    def __init__(self, url: str) -> None:
        self.base_url = url.rstrip("/").removesuffix("/v1")

    def check_alive(self) -> None:
        """Raise ServerFailed if it is known to have ended."""

    def log_tail(self, num_lines: int = 40) -> str:
        """Return the last lines of its log; empty if there is none to read."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Return the samples of ``/metrics``, keyed by name with labels, as Prometheus prints them.

        Raises:
            httpx.HTTPError: It cannot be reached, or has none.
        """
        text = httpx.get(f"{self.base_url}/metrics", timeout=30.0).raise_for_status().text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class ServerProcess(Server):
    """A server on a free port of this machine, by default ``python -m omniserve.server``; a context manager.

    Args:
        arguments: Command line of the server, without ``--host`` and ``--port``.
        log_path: File for what the server prints.
        program: What comes before ``--host`` in the command line.
        environment: Variables beside those of this process.
        cpus: CPUs that it may run on; None: those of this process.
    """

    def __init__(
        self, arguments: Sequence[str], log_path: Path, *, program: Sequence[str] = OMNISERVE,
        environment: Mapping[str, str] | None = None, cpus: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.arguments = tuple(arguments)
        self.log_path = log_path
        self._program, self._environment, self._cpus = tuple(program), dict(environment or {}), cpus
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            super().__init__(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def __enter__(self) -> Self:
        if "-m" in self._program:
            starts(self._program[self._program.index("-m") + 1])
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        port = self.base_url.rsplit(":", 1)[1]
        command = [*self._program, "--host", "127.0.0.1", "--port", port, *self.arguments]
        if self._cpus is not None:
            command = ["taskset", "--cpu-list", ",".join(map(str, self._cpus)), *command]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, process_group=0,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self._environment,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            self._process.wait()
            message = f"the server did not stop within {STOP_TIMEOUT_S:g} s"
            if error is None:
                raise ServerFailed(f"{message}\n{self.log_tail()}") from None
            error.add_note(message)  # the first failure is the one to read

    @property
    def is_running(self) -> bool:
        """The server's first process has not ended."""
        return self._process.poll() is None

    @property
    def group(self) -> int:
        """The process group of the server and of all processes that it started."""
        return self._process.pid

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group."""
        os.killpg(self.group, number)

    def check_alive(self) -> None:
        """Raise ServerFailed if the process has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerFailed(f"the server ended with exit status {status}; its last words:\n{self.log_tail()}")

    def wait_until_healthy(self, timeout_s: float = 180.0) -> float:
        """Wait for ``/health`` to answer 200 and return the seconds since this call.

        Raises:
            ServerFailed: The process ended, or the time is over.
        """
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < timeout_s:
            self.check_alive()
            try:
                if httpx.get(f"{self.base_url}/health", timeout=5.0).status_code == 200:
                    return waited_s
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.1)
        raise ServerFailed(f"the server is not healthy after {timeout_s:g} s\n{self.log_tail()}")

    def log_tail(self, num_lines: int = 40) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

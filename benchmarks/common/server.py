"""Servers to measure: a process of our own, or any other that is running already."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

STOP_TIMEOUT_S = 30.0
BE_TOKENS = 'omniserve_output_tokens_total{service_class="BE"}'
HOST_TOKENS = "omniserve_host_output_tokens_total"


class ServerFailed(RuntimeError):
    """The server ended, did not become healthy, or failed a request of the load; the message ends with its log."""


class Server:
    """A server of somebody else's at ``url``, with or without ``/v1``; that it is gone shows in a failed request."""

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
    """``python -m omniserve.server`` on a free port of this machine; a context manager.

    Args:
        arguments: Command line of the server, without ``--host`` and ``--port``.
        log_path: File for what the server prints.
    """

    def __init__(self, arguments: Sequence[str], log_path: Path) -> None:
        self.arguments = tuple(arguments)
        self.log_path = log_path
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            super().__init__(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def __enter__(self) -> ServerProcess:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        port = self.base_url.rsplit(":", 1)[1]
        address = ["--host", "127.0.0.1", "--port", port]
        # What is measured here is not a server that still compiles and measures.
        command = [sys.executable, "-m", "omniserve.server", *address, "--limit", "profile_start_s=0", *self.arguments]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"}
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise ServerFailed(f"the server did not stop within {STOP_TIMEOUT_S:g} s\n{self.log_tail()}") from error

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

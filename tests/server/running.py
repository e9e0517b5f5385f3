"""Running servers, as tests see them: the clients of one, its metrics and its log; and one in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Self
from urllib.request import ProxyHandler, build_opener
from weakref import WeakSet

import httpx
import openai

START_TIMEOUT_S = 600

servers: WeakSet[Server] = WeakSet()
"""Those that tests have started and not forgotten yet."""

_open = build_opener(ProxyHandler({})).open  # httpx takes longer to make a client than the server for its metrics


def wait_until(condition: Callable[[], object], problem: Callable[[], str] = lambda: "it took too long") -> None:
    """Return when a condition holds; it is looked at every 20 ms, for a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, problem()
        time.sleep(0.02)


class Server:
    """A server behind a socket."""

    url: str

    def __init__(self) -> None:
        self.log: list[str] = []
        servers.add(self)

    def wait_until_ready(self) -> Self:
        """Return this server when it answers."""
        raise NotImplementedError

    def send_signal(self, number: int) -> None:
        raise NotImplementedError

    def wait(self) -> int:
        """Return the exit status when the server has ended."""
        raise NotImplementedError

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.send_signal(number)
        return self.wait()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    def metric(self, name: str) -> float:
        """Return the value of a sample by its full name with labels."""
        with _open(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == name]
        assert values, f"no sample {name} in\n{text}"
        return float(values[0])

    def wait_for_metric(self, name: str, value: float) -> None:
        wait_until(lambda: self.metric(name) == value, lambda: f"{name} is {self.metric(name)}, not {value}")

    def wait_until_free(self) -> None:
        """Wait until nothing runs, nothing waits and no KV is held."""
        for service_class in ("LS", "BE"):
            self.wait_for_metric(f'omniserve_requests_running{{service_class="{service_class}"}}', 0)
            self.wait_for_metric(f'omniserve_requests_queued{{service_class="{service_class}"}}', 0)
        self.wait_for_metric('omniserve_kv_blocks_used{tier="device"}', 0)


class RunningServer(Server):
    """A server subprocess that has said where it listens."""

    def __init__(self, command: list[str], *, own_group: bool = False, **environment: str) -> None:
        super().__init__()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | environment
        self._own_group = own_group
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=own_group,
        )
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if match := re.search(r"on (https?://\S+)/v1", line):
                self.url = match[1]
                self._listening.set()
        self._listening.set()

    def wait_until_ready(self) -> RunningServer:
        assert self._listening.wait(START_TIMEOUT_S), self.log
        assert hasattr(self, "url"), f"the server ended: {''.join(self.log)}"
        return self

    def kill_group(self) -> None:
        """Kill the server and its engine at once; it was started with ``own_group``."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            if self._own_group:
                self.kill_group()
            else:
                self.process.kill()
                self.wait()

    def wait(self) -> int:
        try:
            status = self.process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # has it say where its threads are
            self.process.wait(10)
            self._reader.join(10)
            raise AssertionError(f"the server did not end:\n{''.join(self.log)}") from None
        self._reader.join(10)
        return status

"""A server with the fake engine, in a process of its own, behind a real socket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers_for_tests import byte_level_tokenizer

START_TIMEOUT_S = 60


class RunningServer:
    """A server subprocess that has said where it listens."""

    def __init__(self, command: list[str], **environment: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"on (http://\S+)/v1", line):
                self.url = match[1]
                self._listening.set()
        self._listening.set()

    def wait_until_ready(self) -> RunningServer:
        assert self._listening.wait(START_TIMEOUT_S), self.log
        assert hasattr(self, "url"), f"the server ended: {''.join(self.log)}"
        return self

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    def metric(self, name: str) -> float:
        """Return the value of a sample by its full name with labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == name]
        assert values, f"no sample {name} in\n{text}"
        return float(values[0])

    def wait_for_metric(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 20
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(START_TIMEOUT_S)
        self._reader.join(10)
        return status


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def start_server(tokenizer_folder) -> Iterator[Callable[..., RunningServer]]:
    """Start servers with the fake engine; what still runs at the end is killed."""
    started: list[RunningServer] = []

    def start(
        *flags: str, shutdown_timeout_s: float = 20, fail: str | None = None, **environment: str
    ) -> RunningServer:
        script = Path(__file__).with_name("serve_fake.py")
        command = [sys.executable, str(script), "--tokenizer", str(tokenizer_folder), *flags]
        command += ["--shutdown-timeout", str(shutdown_timeout_s), *([] if fail is None else ["--fail", fail])]
        started.append(RunningServer(command, **environment))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.wait()


@pytest.fixture(scope="session")
def server(start_server) -> RunningServer:
    """The server that most tests share: nothing a test does may stop it."""
    return start_server().wait_until_ready()


@pytest.fixture(scope="session")
def client(server) -> openai.OpenAI:
    return server.client()

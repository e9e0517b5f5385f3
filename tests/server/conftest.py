"""A server with the fake engine, in a process of its own, behind a real socket."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from tokenizers_for_tests import byte_level_tokenizer

START_TIMEOUT_S = 60


class RunningServer:
    """A server subprocess that has said where it listens."""

    def __init__(self, command: list[str], *, own_group: bool = False, **environment: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | environment
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=own_group
        )
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

    def wait_until_free(self) -> None:
        """Wait until nothing runs, nothing waits and no KV is held."""
        for service_class in ("LS", "BE"):
            self.wait_for_metric(f'omniserve_requests_running{{service_class="{service_class}"}}', 0)
            self.wait_for_metric(f'omniserve_requests_queued{{service_class="{service_class}"}}', 0)
        self.wait_for_metric('omniserve_kv_blocks_used{tier="device"}', 0)

    def kill_group(self) -> None:
        """Kill the server and its engine at once; it was started with ``own_group``."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.wait()

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


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def starting(
    tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., RunningServer]]:
    """Start servers with the fake engine; what still runs at the end is killed."""
    started: list[RunningServer] = []

    def start(
        *flags: str,
        shutdown_timeout_s: float = 20,
        fail: str | None = None,
        own_group: bool = False,
        data_home: Path | None = None,
        **environment: str,
    ) -> RunningServer:
        script = Path(__file__).with_name("serve_fake.py")
        command = [sys.executable, str(script), "--tokenizer", str(tokenizer_folder), *flags]
        command += ["--limit", f"shutdown_timeout_s={shutdown_timeout_s}", *([] if fail is None else ["--fail", fail])]
        home = str(data_home or tmp_path_factory.mktemp("data"))
        started.append(RunningServer(command, own_group=own_group, XDG_DATA_HOME=home, **environment))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.kill()
                server.wait()


@pytest.fixture
def start_server(tokenizer_folder, tmp_path_factory) -> Iterator[Callable[..., RunningServer]]:
    """Start servers that end with the test: dozens of idle ones would take half a core from the others."""
    with starting(tokenizer_folder, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_server(tokenizer_folder, tmp_path_factory) -> Iterator[Callable[..., RunningServer]]:
    """Start servers that end with the module's tests."""
    with starting(tokenizer_folder, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def server(tokenizer_folder, tmp_path_factory) -> Iterator[RunningServer]:
    """The server that most tests share: nothing a test does may stop it."""
    with starting(tokenizer_folder, tmp_path_factory) as start:
        yield start().wait_until_ready()


@pytest.fixture(scope="session")
def client(server) -> openai.OpenAI:
    return server.client()


def _postgres_folder() -> Path | None:
    folders = [*Path("/usr/lib/postgresql").glob("*/bin"), Path("/usr/local/bin")]
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A PostgreSQL server of its own; yields the URL of its socket."""
    pytest.importorskip("psycopg")
    programs = _postgres_folder()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (initdb, in /usr/lib/postgresql/*/bin)")
    user = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = next((entry.pw_name for entry in pwd.getpwall() if entry.pw_name in ("postgres", "nobody")), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root, and there is no other user here")
    folder = Path(tempfile.mkdtemp(prefix="omniserve-pg-"))  # not tmp_path, where another user may not go
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        options = f"-k {folder} -c listen_addresses= -c fsync=off"

        def call(program: str, *arguments: str) -> None:
            command = [str(programs / program), *arguments]
            subprocess.run(command, check=True, capture_output=True, user=user, cwd=folder, timeout=120)

        call("initdb", "-D", str(data), "-U", "omniserve", "--auth=trust", "--no-sync")
        call("pg_ctl", "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql+psycopg://omniserve@/postgres?host={folder}"
        finally:
            call("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser; tests that need it are skipped where there is none.

    Until the module ends an event loop runs in this thread: no test after one with a browser can use ``asyncio.run``.
    """
    pytest.importorskip("playwright.sync_api", reason="needs Playwright: install the extra dev")
    from benchmarks.common.browser import chromium, find_chromium

    if find_chromium() is None:
        pytest.skip("needs an installed Chromium or Chrome")
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Any]]:
    """Open a server's dashboard; at the end, nothing may have gone wrong in it, and nobody else may have been asked."""
    opened = []

    def open_page(url: str, *, problems_expected: bool = False, **options: Any) -> Any:
        context = browser.new_context(**options)
        opened.append((context, url, problems := [], asked := set(), problems_expected))
        page = context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
        page.goto(f"{url}/dashboard")
        return page

    yield open_page
    for context, url, problems, asked, problems_expected in opened:
        context.close()
        assert problems_expected or not problems
        assert asked == {urlsplit(url).netloc}

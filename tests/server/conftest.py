"""Servers with the fake engine behind real sockets, most of them in the tests' own process."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import openai
import pytest
from in_process import InProcessServer, logs_of_servers, threads_for_engines
from running import RunningServer, servers
from serve_fake import read_flags
from tokenizers_for_tests import byte_level_tokenizer

from tests.certificates import share_certificates

share_certificates()

_LOG_SIZES = pytest.StashKey["WeakKeyDictionary[Server, int]"]()
"""How many lines the servers had logged before a test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_LOG_SIZES] = WeakKeyDictionary({server: len(server.log) for server in servers})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show in the report of a test that failed what servers have logged since it began."""
    report = yield
    for server in servers if report.failed else ():
        if lines := server.log[item.stash[_LOG_SIZES].get(server, 0) :]:
            report.sections.append((f"log of the server at {getattr(server, 'url', 'no address yet')}", "".join(lines)))
    return report


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory, where the machine has such: databases, which write all through to the disk, wait for none."""
    place: str | None = "/dev/shm"
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < 1 << 30:
        place = None
    with tempfile.TemporaryDirectory(prefix="omniserve-tests-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(memory: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    return folder


Start = Callable[..., Any]


@contextmanager
def starting(tokenizer_folder: Path, memory: Path, *, in_process: bool = True) -> Iterator[Start]:
    """Start servers with the fake engine; what still runs at the end is ended."""
    started: list[InProcessServer | RunningServer] = []

    def start(
        *flags: str,
        shutdown_timeout_s: float = 20,
        fail: str | None = None,
        data_home: Path | None = None,
        own_group: bool = False,
        **environment: str,
    ) -> InProcessServer | RunningServer:
        all_flags = ["--tokenizer", str(tokenizer_folder), *flags, *([] if fail is None else ["--fail", fail])]
        all_flags += ["--limit", f"shutdown_timeout_s={shutdown_timeout_s}"]
        environment["XDG_DATA_HOME"] = str(data_home or tempfile.mkdtemp(dir=memory))
        if in_process:
            started.append(InProcessServer(*read_flags(all_flags), **environment))
        else:
            command = [sys.executable, str(Path(__file__).with_name("serve_fake.py")), *all_flags]
            started.append(RunningServer(command, own_group=own_group, **environment))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.close()


@pytest.fixture(scope="session")
def logged() -> Iterator[None]:
    with logs_of_servers():
        yield


@pytest.fixture
def start_server(logged, tokenizer_folder, memory) -> Iterator[Start]:
    """Start servers in this process that end with the test."""
    with starting(tokenizer_folder, memory) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_server(logged, tokenizer_folder, memory) -> Iterator[Start]:
    """Start servers in this process that end with the module's tests."""
    with starting(tokenizer_folder, memory) as start:
        yield start


@pytest.fixture
def start_process(tokenizer_folder, memory) -> Iterator[Start]:
    """Start servers in processes of their own, for what only a process can do: each takes seconds of a core."""
    with starting(tokenizer_folder, memory, in_process=False) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_process(tokenizer_folder, memory) -> Iterator[Start]:
    """Start servers in processes of their own that end with the module's tests."""
    with starting(tokenizer_folder, memory, in_process=False) as start:
        yield start


@pytest.fixture
def engines_in_threads() -> Iterator[None]:
    """Have the engines that this test starts run in threads of its process."""
    with threads_for_engines():
        yield


@pytest.fixture
def no_pause(monkeypatch) -> None:
    """Start an engine that died again at once: what one in this process has sent needs little time to arrive."""
    monkeypatch.setattr("omniserve.server.engines.supervisor._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("omniserve.server.engines.client._LAST_WORDS_S", 0.5)


@pytest.fixture(scope="session")
def server(logged, tokenizer_folder, memory) -> Iterator[InProcessServer]:
    """The server that most tests share: nothing a test does may stop it."""
    with starting(tokenizer_folder, memory) as start:
        yield start().wait_until_ready()


@pytest.fixture(scope="session")
def client(server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A PostgreSQL server of its own; yields the URL of its socket."""
    pytest.importorskip("psycopg")
    folders = [*Path("/usr/lib/postgresql").glob("*/bin"), Path("/usr/local/bin")]
    programs = next((folder for folder in folders if (folder / "initdb").exists()), None)
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


@contextmanager
def opening(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open dashboards of servers; at the end, nothing may have gone wrong in one, and nobody else have been asked."""
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


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Any]]:
    """Open a server's dashboard; at the end of the test, nothing may have gone wrong in it."""
    with opening(browser) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def open_module_page(browser) -> Iterator[Callable[..., Any]]:
    """Open a server's dashboard for several tests; at the end of the module, nothing may have gone wrong in it."""
    with opening(browser) as open_page:
        yield open_page

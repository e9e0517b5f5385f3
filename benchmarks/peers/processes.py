"""Servers that take turns: while one is measured, the others are stopped by SIGSTOP, or not running at all."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common.client import LS_TIER, LoadRequest, Wire, drive
from benchmarks.common.server import ServerFailed, ServerProcess

HEALTHY_WITHIN_S = 1800.0
REST_S, IDLE_S = 3.0, 2.0
QUIET_WITHIN_S, QUIET_CORES = 120.0, 0.1
SETTLE_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The program, arguments and environment that start an engine's server."""

    name: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    wire: Wire
    version: str
    settled_arguments: tuple[str, ...] = ()
    """Further arguments where a server is wanted that neither compiles nor measures beside what it serves."""
    weights: str = ""
    """Label of the weights that it serves."""


def private_folders(folder: Path) -> dict[str, str]:
    """Return the variables that make programs keep caches and data below a folder."""
    return {
        "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CONFIG_HOME": str(folder / "config"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"), "VLLM_CACHE_ROOT": str(folder / "cache" / "vllm"),
    }  # fmt: skip


def cpu_seconds(group: int, processes: Path = Path("/proc")) -> float:
    """Return the CPU time so far of all processes of a process group that are there now."""
    ticks = 0
    for path in processes.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def first_token_requests(*, output: int = 1) -> list[LoadRequest]:
    """Return one small LS request."""
    return [LoadRequest(send_at_s=0.0, prompt=[1, 2, 3], max_tokens=output, service_tier=LS_TIER)]


@contextmanager
def running(engine: Engine, *, cpus: Sequence[int], home: Path, log: Path) -> Iterator[tuple[ServerProcess, float]]:
    """Give a server that has brought its first token, and the seconds from its start to that token."""
    home.mkdir(parents=True, exist_ok=True)
    environment = {**private_folders(home), **engine.environment}
    began_s = time.monotonic()
    with ServerProcess(
        engine.arguments, log, program=engine.program, environment=environment, cpus=cpus
    ) as server:  # fmt: skip
        server.wait_until_healthy(HEALTHY_WITHIN_S)
        drive(server, first_token_requests(), cutoff_s=HEALTHY_WITHIN_S, wire=engine.wire)
        yield server, time.monotonic() - began_s


class Pool:
    """The servers of all engines; a context manager that ends them.

    Args:
        engines: By name.
        cpus: CPUs that each server gets.
        folder: For logs, and for caches that last from one run to the next.
        warm_up: What each server serves when it has started.
        in_turns: Start a server whenever it is used and end it then, instead of keeping all in memory.
    """

    def __init__(
        self, engines: Mapping[str, Engine], *, cpus: Sequence[int], folder: Path, warm_up: Sequence[LoadRequest],
        in_turns: bool,
    ) -> None:  # fmt: skip
        self._engines, self._cpus, self._folder, self._warm_up = dict(engines), tuple(cpus), folder, list(warm_up)
        self._in_turns = in_turns
        self._servers: dict[str, ServerProcess] = {}
        self._stack = ExitStack()
        self.idle_cores: dict[str, float] = {}
        """Cores that each server used with nothing to do, from ``REST_S`` after its warm-up, for ``IDLE_S``."""
        self.first_tokens: dict[str, list[str]] = {}
        """First token of each of the same prompts, by server, as text."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers.values():
            if server.is_running:  # a stopped process does not heed SIGTERM
                server.signal_all(signal.SIGCONT)
        self._stack.close()

    @contextmanager
    def active(self, name: str) -> Iterator[ServerProcess]:
        """Give a server that is warm, while all others rest.

        Raises:
            ServerFailed: It did not start, or did not serve its warm-up.
        """
        if self._in_turns:
            with self._started(name) as server:
                yield server
            return
        if name not in self._servers:
            self._servers[name] = self._stack.enter_context(self._started(name))
        server = self._servers[name]
        server.check_alive()
        server.signal_all(signal.SIGCONT)
        try:
            self._settle(name, server)
            yield server
        finally:
            if server.is_running:
                server.signal_all(signal.SIGSTOP)

    @contextmanager
    def _started(self, name: str) -> Iterator[ServerProcess]:
        plain = name.replace(", ", "-")
        home, log = self._folder / "homes" / plain, self._folder / f"{plain}.log"
        engine = self._engines[name]
        engine = dataclasses.replace(engine, arguments=(*engine.arguments, *engine.settled_arguments))
        with running(engine, cpus=self._cpus, home=home, log=log) as (server, _):
            drive(server, self._warm_up, cutoff_s=HEALTHY_WITHIN_S, wire=self._engines[name].wire)
            if name not in self.idle_cores:
                self.first_tokens[name] = _first_tokens(server)
                self.idle_cores[name] = _idle_cores(server)
            yield server

    def _settle(self, name: str, server: ServerProcess) -> None:
        """Serve small requests for a second: an engine that watches other processes has seen those of before."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            drive(server, first_token_requests(output=16), cutoff_s=60.0, wire=self._engines[name].wire)


def _first_tokens(server: ServerProcess, prompts: int = 8) -> list[str]:
    found = []
    for number in range(prompts):
        body = {"prompt": [5 + 7 * number + 11 * i for i in range(32)], "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60.0).raise_for_status()
        found.append(answer.json()["choices"][0]["text"].strip())
    return found


def _idle_cores(server: ServerProcess) -> float:
    server.check_alive()
    time.sleep(REST_S)
    before_s, began_s = cpu_seconds(server.group), time.monotonic()
    time.sleep(IDLE_S)
    return (cpu_seconds(server.group) - before_s) / (time.monotonic() - began_s)


def start_times(engine: Engine, *, cpus: Sequence[int], folder: Path, log: Path) -> dict[str, float]:
    """Return the seconds from start to first token, first with no cache in ``folder``, then with those of that start.

    The first server is ended when it has nothing to do any more: it may still compile or measure at its first token.

    Raises:
        ServerFailed: There is something in the folder, or the server did not start.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ServerFailed(f"a cold start needs an empty folder, and {folder} is not")
    times = {}
    for kind in ("cold_s", "warm_s"):
        with running(engine, cpus=cpus, home=folder, log=log) as (server, seconds):
            times[kind] = seconds
            if kind == "cold_s":
                _wait_until_quiet(server)
    return times


def _wait_until_quiet(server: ServerProcess) -> None:
    """Wait until a server's processes use hardly any CPU time; after two minutes say that they still do."""
    until_s = time.monotonic() + QUIET_WITHIN_S
    while (cores := _idle_cores(server)) > QUIET_CORES:
        if time.monotonic() > until_s:
            print(f"a server without requests uses {cores:.1f} cores after {QUIET_WITHIN_S:.0f} s; it is ended now")
            return

"""A server with CPU hosts or ranks that Ray starts, on a cluster of this machine alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("ray")

_START_S = 240.0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


class Cluster:
    """``python -m omniserve.cluster`` and its server."""

    def __init__(self, folder: Path, *options: str, server: tuple[str, ...] = ()) -> None:
        (port,) = _free_ports(1)
        self.log = folder / "log"
        command = [sys.executable, "-m", "omniserve.cluster", "--address", "local", *options, "--"]
        command += ["--port", str(port), "--data-dir", str(folder), "--profile", "none", *server]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0)
        self.wait_until(self._is_ready, "the server")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _START_S
        while not condition():
            is_up = self.process.poll() is None
            assert is_up and time.monotonic() < deadline_s, f"waited for {what}:\n{self.log.read_text()}"
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health").status_code == 200
        return False

    def complete(self, prompt: str, num_tokens: int, tier: str = "flex") -> str:
        body = {
            "model": "omniserve-builtin", "prompt": prompt, "max_tokens": num_tokens, "service_tier": tier,
            "temperature": 0.0, "ignore_eos": True,
        }  # fmt: skip
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"omniserve_{name}{{"))

    def actors(self, name: str) -> list[psutil.Process]:
        """Return the processes of actors of this class."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{name}"):
                    found.append(process)
        return found

    def close(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.client.close()
            _, left = psutil.wait_procs(family, timeout=30)
            for process in left:
                process.kill()
        assert not left, left


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    started: list[Cluster] = []

    def start_one(*options: str, server: tuple[str, ...] = ()) -> Cluster:
        started.append(Cluster(tmp_path, *options, server=server))
        return started[-1]

    yield start_one
    for cluster in started:
        cluster.close()


def _tell_a_long_story(cluster: Cluster, number: int, told: dict[int, str]) -> None:
    told[number] = cluster.complete(f"story {number}: " + "once upon a time " * 30, 150)


@pytest.mark.slow
def test_cpu_hosts_are_started_again_and_no_request_is_lost(start: Callable[..., Cluster]) -> None:
    first, _ = _free_ports(2)
    cluster = start(
        "--cpu-hosts", "1", "--cpu-host-threads", "1", "--cpu-host-kv-gib", "0.2", "--cpu-host-port", str(first),
        server=("--device-kv-gib", "0.02", "--host-kv-gib", "0.001"),
    )  # fmt: skip
    told: dict[int, str] = {}
    threads = [threading.Thread(target=_tell_a_long_story, args=(cluster, i, told)) for i in range(24)]
    for thread in threads:
        thread.start()
    cluster.wait_until(lambda: cluster.metric("cpu_host_tasks_total") > 0, "a task on the host")
    (host,) = cluster.actors("CPUHost")
    host.kill()
    for thread in threads:
        thread.join()
    assert sorted(told) == list(range(24))
    assert cluster.metric("cpu_host_losses_total") == 1

    cluster.wait_until(lambda: cluster.metric("cpu_host_connected") == 1, "the host that Ray has started again")


@pytest.mark.slow
def test_ranks_share_cpu_hosts(start: Callable[..., Cluster]) -> None:
    first, ranks = _free_ports(2)
    cluster = start(
        "--cpu-hosts", "1", "--cpu-host-threads", "1", "--cpu-host-kv-gib", "0.2", "--cpu-host-port", str(first),
        "--tensor-parallel-size", "2", "--rank-port", str(ranks),
        server=("--device-kv-gib", "0.004", "--host-kv-gib", "0.001"),
    )  # fmt: skip
    told: dict[int, str] = {}
    threads = [threading.Thread(target=_tell_a_long_story, args=(cluster, i, told)) for i in range(24)]
    for thread in threads:
        thread.start()
    cluster.wait_until(lambda: cluster.metric("cpu_host_tasks_total") > 0, "a task on the host")
    for thread in threads:
        thread.join()
    assert sorted(told) == list(range(24))
    assert cluster.metric("cpu_host_losses_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_prefill_engine_is_started_again(start: Callable[..., Cluster], num_ranks: int) -> None:
    port, rank_port = _free_ports(2)
    ranks = ("--tensor-parallel-size", str(num_ranks), "--rank-port", str(rank_port))
    cluster = start(
        "--prefill-engines", "1", "--prefill-port", str(port), *ranks, server=("--prefill-placement", "always")
    )

    def goes_there() -> bool:
        prompt = f"{time.monotonic()}: " + "once upon a time " * 30
        before = cluster.metric("prefilled_tokens_total")
        cluster.complete(prompt, 5, tier="default")
        return cluster.metric("prefilled_tokens_total") > before

    cluster.wait_until(goes_there, "a prompt on the prefill engine")
    (engine,) = cluster.actors("PrefillEngine")
    engine.kill()
    cluster.complete("once upon a time " * 30, 5, tier="default")
    cluster.wait_until(goes_there, "the prefill engine that Ray has started again")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_a_rank_is_started_again(start: Callable[..., Cluster], parallel: str) -> None:
    (port,) = _free_ports(1)
    cluster = start(f"--{parallel}-parallel-size", "2", "--rank-port", str(port))
    before = cluster.complete("once upon a time", 20, tier="default")
    (rank,) = cluster.actors("Rank")
    rank.kill()

    def answers() -> bool:
        with contextlib.suppress(AssertionError, httpx.HTTPError):
            return cluster.complete("once upon a time", 20, tier="default") == before
        return False

    cluster.wait_until(answers, "the engine and a new rank")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "give --cpu-hosts, --prefill-engines, --tensor-parallel-size or"),
        (["--cpu-hosts", "-1"], "--cpu-hosts must be >= 0"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size must be >= 1"),
        (["--cpu-hosts", "1", "--cpu-host-kv-gib", "0"], "--cpu-host-kv-gib must be > 0"),
        (["--cpu-hosts", "1", "--cpu-host-threads", "0"], "--cpu-host-threads must be >= 1"),
    ],
)
def test_wrong_flags_are_told(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    from omniserve.cluster.cli import main

    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert told in capsys.readouterr().err

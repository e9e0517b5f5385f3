"""CPU hosts on the network, killed, stopped and cut off at any time, change no token."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniserve import HostsConfig
from omniserve.remote import host_cli
from omniserve.remote.host_server import HostServer
from tests.host.helpers import shorten_pauses
from tests.pairwise import pairwise
from tests.parity.engine_histories import run_histories
from tests.parity.models import MODELS
from tests.parity.test_engine import BOTH, model_and_reference
from tests.prefill.servers import SECRET
from tests.quick import slow_except
from tests.remote.proxy import Proxy


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@contextlib.contextmanager
def hosts_behind_proxies(
    model: Any, num_hosts: int, secret_file: str, *, num_ranks: int = 1
) -> Iterator[tuple[HostsConfig, list[Proxy]]]:
    """Run hosts in this process, each with room for a few requests."""
    kv_bytes = num_ranks * 14 * model.omniserve.spec.kv_block_bytes(8)
    hosts = [
        HostServer(secret=SECRET.encode(), kv_bytes=kv_bytes, num_threads=num_ranks, cores=None)
        for _ in range(num_hosts)
    ]
    for host in hosts:
        host.start()
    proxies = [Proxy(host.address) for host in hosts]
    addresses = tuple("{}:{}".format(*proxy.address) for proxy in proxies)
    try:
        yield HostsConfig(cpu_hosts=addresses, cpu_host_secret_file=secret_file, cpu_host_timeout_s=2.0), proxies
    finally:
        for proxy in proxies:
            proxy.close()
        for host in hosts:
            host.close()


def small_pools(model: Any) -> dict[str, Any]:
    """Return sizes of pools that send requests to the network."""
    block_bytes = model.omniserve.spec.kv_block_bytes(8)
    return {
        "block_size": 8, "device_kv_bytes": 9 * block_bytes, "host_kv_bytes": 6 * block_bytes, "host_kv_dtype": "auto",
        "max_host_requests": 16, "max_piggyback_seats": 8, "max_num_batched_tokens": 64,
    }  # fmt: skip


def calm(proxies: list[Proxy]) -> Callable[[random.Random], None]:
    """Let proxies pass all on, whatever a history before was about to spoil."""
    for proxy in proxies:
        proxy.corrupt = ""  # a secret that is spoilt as an engine starts is a wrong one
    return lambda rng: None


def cuts(proxies: list[Proxy]) -> Callable[[random.Random], None]:
    calm(proxies)

    def disturb(rng: random.Random) -> None:
        chance = rng.random()
        if chance < 0.03:
            rng.choice(proxies).cut()
        elif chance < 0.04:
            rng.choice(proxies).corrupt = rng.choice(["up", "down"])

    return disturb


@pytest.mark.parametrize(
    ("family", "num_hosts"),
    slow_except([("llama", 1), ("gemma2", 2)], [(family, num_hosts) for family in MODELS for num_hosts in (1, 2)]),
)
def test_tokens_of_any_family_equal_hugging_face(family: str, num_hosts: int, secret_file: str) -> None:
    model, reference = model_and_reference(family, "cpu")
    with hosts_behind_proxies(model, num_hosts, secret_file) as (hosts, proxies):
        run_histories(
            model, reference, range(1000, 1001), reach=("network_tasks", "network_moves"), kv="tiered", hosts=hosts,
            has_profile=False, **small_pools(model),
        )  # fmt: skip
        run_histories(
            model, reference, range(1010, 1012), reach=("network_tasks",), kv="tiered", hosts=hosts,
            disturb=lambda seed: cuts(proxies), has_profile=False, **small_pools(model),
        )  # fmt: skip


@pytest.mark.parametrize(
    "scheduler", slow_except(("omniserve",), ["omniserve", "apex", "llumnix", "neo", "neo-paper", "conserve"])
)
def test_every_policy_that_moves_requests_may_have_hosts(scheduler: str, secret_file: str) -> None:
    model, reference = model_and_reference("llama", "cpu")
    attends = scheduler in ("omniserve", "apex", "neo", "neo-paper")
    with hosts_behind_proxies(model, 2, secret_file) as (hosts, proxies):
        disturb = (lambda seed: calm(proxies), lambda seed: cuts(proxies))
        options = {"faults": BOTH, "drafts": BOTH, "async_steps": BOTH, "step_graphs": ("off", "on")}
        rows = pairwise(kv=("tiered", "incremental"), disturb=disturb, **options)
        run_histories(
            model, reference, range(1020, 1021), reach=("network_tasks",) if attends else (), rows=rows, hosts=hosts,
            scheduler=scheduler, **small_pools(model),
        )  # fmt: skip


@contextlib.contextmanager
def host_process(secret_file: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``python -m omniserve.host``; yield its address and process."""
    command = [sys.executable, "-m", "omniserve.host", "--listen", "127.0.0.1:0", "--secret-file", secret_file]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listens at ").strip(), process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_process_that_is_killed_or_stopped_changes_no_token(how: signal.Signals, secret_file: str) -> None:
    model, reference = model_and_reference("llama", "cpu")
    with host_process(secret_file, "--kv-gib", "0.001", "--threads", "1") as (address, process):
        hosts = HostsConfig(cpu_hosts=(address,), cpu_host_secret_file=secret_file, cpu_host_timeout_s=0.5)

        def disturb(rng: random.Random) -> None:
            if rng.random() < 0.05:
                os.kill(process.pid, how)

        run_histories(
            model, reference, range(1030, 1031), reach=("network_tasks",), kv="tiered", hosts=hosts, has_profile=False,
            **small_pools(model),
        )  # fmt: skip
        run_histories(
            model, reference, range(1031, 1032), reach=("lost_hosts",), kv="tiered", hosts=hosts, has_profile=False,
            disturb=lambda seed: disturb, **small_pools(model),
        )  # fmt: skip


def test_a_host_process_ends_whichever_thread_gets_the_signal(secret_file: str) -> None:
    with host_process(secret_file, "--kv-gib", "0.001", "--threads", "1") as (_, process):
        other = next(int(each) for each in os.listdir(f"/proc/{process.pid}/task") if int(each) != process.pid)
        assert ctypes.CDLL(None).tgkill(process.pid, other, signal.SIGTERM) == 0
        assert process.wait(30) == 0


_ENDED_AS_IT_STARTS = """
import os, signal, sys
from omniserve.remote.host_cli import main
from omniserve.remote.host_server import HostServer

def start_and_end(server, start=HostServer.start):
    start(server)
    os.kill(os.getpid(), signal.SIGTERM)

HostServer.start = start_and_end
sys.exit(main(sys.argv[1:]))
"""


def test_a_host_process_ends_well_before_it_has_said_where_it_listens(secret_file: str) -> None:
    options = ["--listen", "127.0.0.1:0", "--secret-file", secret_file, "--kv-gib", "0.001", "--threads", "1"]
    command = [sys.executable, "-c", _ENDED_AS_IT_STARTS, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_host_process_says_what_is_wrong(
    tmp_path: Path, secret_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cli, "set_up_logs", lambda *_: None)  # of a process of its own
    short = tmp_path / "short"
    short.write_text("short")
    here = ["--listen", "127.0.0.1:0", "--secret-file"]
    for options, told in (
        (["--listen", "127.0.0.1", "--secret-file", secret_file], "must be HOST:PORT"),
        (["--listen", "127.0.0.1:0"], "give --secret-file"),
        ([*here, str(short)], "at least 16 characters"),
        ([*here, secret_file, "--kv-gib", "0"], "--kv-gib must be > 0"),
        ([*here, secret_file, "--threads", "0"], "--threads must be >= 1"),
        (["--listen", "192.0.2.1:0", "--secret-file", secret_file], "Cannot assign requested address"),
    ):
        assert host_cli.main(options) == 2
        printed = capsys.readouterr().err
        assert told in printed and len(printed.splitlines()) == 1, printed

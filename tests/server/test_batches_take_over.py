"""Several server processes, one PostgreSQL: one of them runs the lines, and another one takes over from it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from batch_inputs import completion_line, prompt_of, results, submit, wait_for
from sqlalchemy import create_engine, text

from omniserve.server.batches.database import LineState
from tests.quick import slow_except

NUM_BATCHES = 3
LINES = 60
KILLS = 3
CONSTANTS = {
    "omniserve.server.batches.database._BUSY_TIMEOUT_S": 3.0,
    "omniserve.server.batches.database._PG_IDLE_TIMEOUT_S": 4.0,
    "omniserve.server.batches.runner._POLL_S": 0.1,
    "omniserve.server.batches.runner._RETRY_S": 0.2,
}
"""Shorter waits than the product's, in all servers here."""


@pytest.fixture
def database_url(postgres) -> Iterator[str]:
    """An empty database."""
    name = f"test_{uuid.uuid4().hex}"
    engine = create_engine(postgres, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"create database {name}"))
    engine.dispose()
    yield postgres.replace("/postgres?", f"/{name}?")


@dataclass(frozen=True)
class Kill:
    """The state just before a server was killed."""

    server: int
    log_sizes: dict[int, int]
    done: set[tuple[int, int]]
    """Lines (batch, line) whose result was in the database."""


class Fleet:
    """Servers of one database, each with a log of what it computes.

    Args:
        start_server: Starts one in this process.
        start_process: Starts one that can be frozen and killed.
    """

    def __init__(self, start_server, start_process, folder: Path, url: str) -> None:
        self._start_server, self._start_process = start_server, start_process
        self._folder = folder
        self._url = url
        self._engine = create_engine(url)
        self.servers: dict[int, object] = {}
        self.num_started = 0
        self.numbers: dict[str, int] = {}
        """Number of each batch by its id."""
        self.kills: list[Kill] = []

    def log(self, server: int) -> Path:
        return self._folder / f"work-{server}"

    def start(self, *, in_process: bool = True):
        number = self.num_started
        self.num_started += 1
        flags = ("--data-dir", str(self._folder / "data"), "--database-url", self._url)
        flags += ("--limit", "batch_concurrency=8", "--work-log", str(self.log(number)))
        start = self._start_server
        if not in_process:
            start = functools.partial(self._start_process, own_group=True, FAKE_CONSTANTS=json.dumps(CONSTANTS))
        self.servers[number] = start(*flags).wait_until_ready()
        return self.servers[number]

    def kill(self, number: int) -> None:
        with self._engine.connect() as connection:
            query = "select batch_id, number from omniserve_lines where state = :done"
            lines = connection.execute(text(query), {"done": int(LineState.DONE)}).all()
            query = "select id from omniserve_batches where status = 'completed'"
            batches = connection.execute(text(query)).scalars().all()
        done = {(self.numbers[batch_id], line - 1) for batch_id, line in lines}
        done |= {(self.numbers[batch_id], i) for batch_id in batches for i in range(LINES)}
        sizes = {i: self.log(i).stat().st_size for i in range(self.num_started)}
        self.kills.append(Kill(number, sizes, done))
        self.servers.pop(number).kill_group()

    def cut_connections(self) -> None:
        """Close every connection of every server to the database."""
        self._cut("pg_stat_activity where datname = current_database()")

    def cut_lock(self) -> None:
        """Close the connection that holds the owner's lock."""
        self._cut("pg_locks where locktype = 'advisory' and granted")

    def _cut(self, whose: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(text(f"select pg_terminate_backend(pid) from {whose} and pid <> pg_backend_pid()"))

    def runs(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Return for each line who ran it, and how many kills there were before."""
        line_of = {tuple(prompt_of(b, n)): (b, n) for b in range(NUM_BATCHES) for n in range(LINES)}
        runs = defaultdict(list)
        for server in range(self.num_started):
            at = 0
            for entry in self.log(server).read_bytes().splitlines(keepends=True):
                kills_before = sum(at >= kill.log_sizes.get(server, 0) for kill in self.kills)
                runs[line_of[tuple(map(int, entry.split()[1:]))]].append((server, kills_before))
                at += len(entry)
        return runs

    def close(self) -> None:
        self._engine.dispose()


def lines_of(batch: int) -> list[dict[str, object]]:
    sizes = random.Random(batch)
    return [completion_line(n, prompt=prompt_of(batch, n), max_tokens=sizes.randint(10, 100)) for n in range(LINES)]


@pytest.fixture
def fleet(start_server, start_process, tmp_path, database_url, monkeypatch) -> Iterator[Fleet]:
    for place, value in CONSTANTS.items():
        monkeypatch.setattr(place, value)
    fleet = Fleet(start_server, start_process, tmp_path, database_url)
    yield fleet
    for server in fleet.servers.values():
        server.close()
    fleet.close()


@pytest.fixture
def many_lines(monkeypatch) -> None:
    """Have batches outlast several starts of servers."""
    monkeypatch.setitem(globals(), "LINES", 150)


def submit_all(fleet: Fleet, clients) -> None:
    for number in range(NUM_BATCHES):
        fleet.numbers[submit(clients[number % len(clients)], lines_of(number)).id] = number


def check_results(fleet: Fleet, client) -> None:
    for batch_id, number in fleet.numbers.items():
        batch = wait_for(client, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
        found = results(client, batch.output_file_id)
        assert [entry["custom_id"] for entry in found] == [line["custom_id"] for line in lines_of(number)]
        assert len({entry["id"] for entry in found}) == LINES


def test_one_of_two_servers_runs_all_lines_once(fleet):
    servers = [fleet.start(), fleet.start()]
    submit_all(fleet, [server.client() for server in servers])
    check_results(fleet, servers[1].client())
    runs = fleet.runs()
    assert len(runs) == NUM_BATCHES * LINES and all(who == [(0, 0)] for who in runs.values())
    for server in servers:
        assert server.stop() == 0
    fleet.servers.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("many_lines")
def test_death_of_servers_repeats_only_what_they_had_not_done(fleet):
    rng = random.Random(1)
    submit_all(fleet, [fleet.start(in_process=False).client() for _ in range(2)])
    for _ in range(KILLS):
        time.sleep(rng.uniform(0.2, 1.5))
        fleet.kill(rng.choice(sorted(fleet.servers)))
        last = fleet.start(in_process=False)
    check_results(fleet, last.client())
    runs = fleet.runs()
    assert len(runs) == NUM_BATCHES * LINES
    killed_after = {kill.server: i for i, kill in enumerate(fleet.kills)}
    for line, who in runs.items():
        for (one, one_after), (other, other_after) in itertools.combinations(who, 2):
            assert killed_after.get(one, KILLS) < other_after or killed_after.get(other, KILLS) < one_after, (
                f"line {line} was run by two servers that lived: {who}"
            )
    for i, kill in enumerate(fleet.kills):
        for line in kill.done:
            assert all(kills_before <= i for _, kills_before in runs[line]), f"{line} was done, and was run again"


def test_connections_that_break_lose_and_repeat_nothing(fleet):
    rng = random.Random(2)
    client = fleet.start().client()
    submit_all(fleet, [client])
    for _ in range(6):
        time.sleep(rng.uniform(0.05, 0.3))
        fleet.cut_connections()
    check_results(fleet, client)
    runs = fleet.runs()
    assert len(runs) == NUM_BATCHES * LINES and all(len(who) == 1 for who in runs.values())


@pytest.mark.slow
@pytest.mark.usefixtures("many_lines")
def test_connections_that_break_while_another_server_waits_lose_nothing(fleet):
    rng = random.Random(3)
    clients = [fleet.start().client(), fleet.start().client()]
    submit_all(fleet, clients)
    for _ in range(4):
        time.sleep(rng.uniform(0.3, 0.9))
        fleet.cut_connections()
    check_results(fleet, clients[0])
    assert len(fleet.runs()) == NUM_BATCHES * LINES


@pytest.mark.parametrize("lock_is", slow_except(("cut",), ["cut", "left to the database"]))
def test_owner_that_was_frozen_changes_nothing_when_it_wakes(fleet, lock_is):
    frozen, other = fleet.start(in_process=False), fleet.start()
    submit_all(fleet, [frozen.client(), other.client()])
    while not fleet.log(0).stat().st_size:
        time.sleep(0.01)
    os.killpg(frozen.process.pid, signal.SIGSTOP)
    try:
        if lock_is == "cut":
            fleet.cut_lock()
        check_results(fleet, other.client())
        assert {server for who in fleet.runs().values() for server, _ in who} == {0, 1}
    finally:
        os.killpg(frozen.process.pid, signal.SIGCONT)
    more = submit(frozen.client(), lines_of(NUM_BATCHES))
    assert wait_for(frozen.client(), more.id).request_counts.completed == LINES
    check_results(fleet, frozen.client())

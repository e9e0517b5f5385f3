"""Cores that others use are left to them; the device tier's threads follow."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import pytest
import torch

from omniserve.host import cores
from omniserve.host.cores import CoreSplit, OtherUsers, read_competition, read_core_seconds

CPU = torch.device("cpu")


class Machine:
    """A machine with a clock of its own, on which others use so many cores and this process so many."""

    def __init__(self) -> None:
        self.now_s, self.busy_s, self.own_s = 100.0, 5000.0, 70.0
        self.others = OtherUsers(lambda: (self.busy_s, self.own_s), lambda: self.now_s)

    def run(self, seconds: float, *, others: float, own: float = 1.0) -> None:
        self.now_s += seconds
        self.busy_s += seconds * (others + own)
        self.own_s += seconds * own

    def run_for_long(self, *, others: float) -> None:
        """Run until nothing is remembered of what was before."""
        self.run(30.0, others=others)
        self.others.cores()


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def split_of(
    machine: Machine, *, host_threads: int = 0, device_threads: int | None = None, cores: int = 8
) -> CoreSplit:
    split = CoreSplit(device=CPU, device_threads=device_threads, host_threads=host_threads, others=machine.others)
    if device_threads is None:
        split.threads_alone, split.threads_shared = cores, max(1, cores - host_threads)
    return split


def test_others_are_what_this_process_is_not() -> None:
    machine = Machine()
    assert machine.others.cores() == 0
    machine.run(20.0, others=1.25, own=3.0)
    assert machine.others.cores() == pytest.approx(1.25)
    machine.run(0.1, others=6.0)
    assert machine.others.cores() == pytest.approx(1.25), "too short to tell"
    machine.run(0.9, others=0.0)
    assert machine.others.cores() == pytest.approx(0.6)


def test_rounding_of_the_systems_clock_is_nobody() -> None:
    machine = Machine()
    machine.run(1.0, others=-0.01)
    assert machine.others.cores() == 0


@pytest.mark.parametrize(
    ("used", "num_left"), [(0.0, 0), (0.39, 0), (0.41, 1), (1.39, 1), (1.41, 2), (6.9, 7), (40.0, 40)]
)
def test_a_core_is_left_that_others_use_for_two_fifths_of_the_time(used: float, num_left: int) -> None:
    machine = Machine()
    split = split_of(machine)
    machine.run_for_long(others=used)
    split.apply(host_works=False)
    assert split.num_left == num_left
    assert torch.get_num_threads() == max(1, 8 - num_left)


def test_it_is_taken_back_below_a_quarter_and_not_before() -> None:
    machine = Machine()
    split = split_of(machine)
    left = []
    for used in (0.3, 0.5, 0.3, 1.3, 1.5, 1.3, 1.2, 0.26, 0.24, 0.3):
        machine.run_for_long(others=used)
        split.apply(host_works=False)
        left.append(split.num_left)
    assert left == [0, 1, 1, 1, 2, 2, 1, 1, 0, 0]


def watch(machine: Machine, split: CoreSplit, others: Iterable[float]) -> list[int]:
    """Return how many cores are left after each quarter of a second in which others use so many."""
    left = []
    for used in others:
        machine.run(0.25, others=used)
        split.apply(host_works=False)
        left.append(split.num_left)
    return left


def test_a_client_that_now_and_then_sends_a_request_takes_no_core() -> None:
    """The client is busy for up to 0.3 s at once, the server's HTTP process beside it, and both work within a
    window."""
    machine = Machine()
    split = split_of(machine, cores=2)
    assert not any(watch(machine, split, [1.2, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 0.0] * 50))
    assert split.steps_by_threads == {2: 400}


@pytest.mark.parametrize(("used", "quarters"), [(2.0, 1), (1.0, 3), (0.7, 4), (0.5, 7)])
def test_the_more_others_use_the_sooner_a_core_is_left_to_them(used: float, quarters: int) -> None:
    machine = Machine()
    split = split_of(machine)
    left = watch(machine, split, [used] * quarters)
    assert left[-1] >= 1 and not any(left[:-1])
    assert watch(machine, split, [0.0]) == [0], "they have ended"


def test_steps_are_counted_by_threads() -> None:
    machine = Machine()
    split = split_of(machine, host_threads=4)
    watch(machine, split, [0.0, 0.0])
    split.apply(host_works=True)
    machine.run_for_long(others=1.0)
    watch(machine, split, [1.0])
    assert split.steps_by_threads == {8: 2, 4: 1, 7: 1}
    assert not CoreSplit(device=torch.device("cuda"), device_threads=None, host_threads=2).steps_by_threads


def test_the_host_tier_keeps_its_share() -> None:
    machine = Machine()
    split = split_of(machine, host_threads=4)
    machine.run_for_long(others=2.0)
    for host_works, threads in ((False, 6), (True, 2), (False, 6)):
        split.apply(host_works=host_works)
        assert torch.get_num_threads() == threads
    machine.run_for_long(others=7.0)
    split.apply(host_works=True)
    assert torch.get_num_threads() == 1


def test_threads_that_were_asked_for_are_had() -> None:
    machine = Machine()
    split = split_of(machine, device_threads=3)
    machine.run_for_long(others=5.0)
    split.apply(host_works=False)
    assert (torch.get_num_threads(), split.num_left) == (3, 0)


def test_two_that_share_a_machine_halve_it() -> None:
    rng, sizes, machines = random.Random(1), [16, 16], [Machine(), Machine()]
    splits = [split_of(machine, cores=16) for machine in machines]
    for _ in range(50):
        i = rng.randrange(2)
        used = [min(size, 8) if sum(sizes) > 16 else size for size in sizes]
        machines[i].run(0.3, others=used[1 - i], own=used[i])
        splits[i].apply(host_works=False)
        sizes[i] = torch.get_num_threads()
    assert sizes == [8, 8]


def seen_of_others() -> float:
    """Return the core seconds of others that were counted while one of them worked for one."""
    busy_s, own_s = read_competition()
    code = "import time\nwhile time.process_time() < 1.0: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    busy_after_s, own_after_s = read_competition()
    return (busy_after_s - busy_s) - (own_after_s - own_s)


def test_a_process_that_takes_a_core_is_seen() -> None:
    assert seen_of_others() > 0.9


def test_a_niced_one_is_seen_by_those_that_are_niced_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cores, "read_core_seconds", lambda *, with_niced: asked.append(with_niced) or (0.0, 0.0))
    for priority in (0, 5, -5):
        monkeypatch.setattr(os, "getpriority", lambda which, who, priority=priority: priority)
        assert read_competition() == (0.0, 0.0)
    assert asked == [False, True, False]


def test_what_counts_of_the_systems_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of this process alone; idle and waiting times do not count, niced ones only if asked for."""
    tick, mine = os.sysconf("SC_CLK_TCK"), min(os.sched_getaffinity(0))
    times = [10, 20, 30, 1000, 2000, 40, 50, 60, 5, 6]  # user nice system idle iowait irq softirq steal guest...
    rows = {"cpu": [9 * t for t in times], f"cpu{mine}": times, "cpu9999": times}
    lines = [f"{name} {' '.join(str(tick * t) for t in row)}" for name, row in rows.items()]
    monkeypatch.setattr(cores, "lines_of", lambda path: [*lines, "intr 5 5", "", "ctxt 7"])
    assert read_core_seconds()[0] == 10 + 20 + 30 + 40 + 50 + 60
    assert read_core_seconds(with_niced=False)[0] == 10 + 30 + 40 + 50 + 60
    monkeypatch.setattr(cores, "lines_of", lambda path: [])
    assert read_core_seconds() == (0.0, 0.0)
    assert OtherUsers().cores() == 0.0


def test_this_process_is_not_among_the_others() -> None:
    busy_s, own_s = read_core_seconds()
    assert busy_s > own_s > 0
    ends_s = time.process_time() + 1.0
    while time.process_time() < ends_s:
        pass
    busy_after_s, own_after_s = read_core_seconds()
    assert own_after_s - own_s == pytest.approx(1.0, abs=0.1)
    assert busy_after_s - busy_s > 0.9, "but it is among those who are busy"

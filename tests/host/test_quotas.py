"""Threads are as many as a CPU quota allows, whichever control group above this process has it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omniserve.host import cores
from omniserve.host.cores import CoreSplit, available_cores, default_host_threads, quota_note, share_quota
from omniserve.host.quotas import cpu_quota

CPU = torch.device("cpu")
V2 = "41 30 0:38 {group} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {group} {at} rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
OTHER_V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
AT = "/sys/fs/cgroup"


class Machine:
    """Control groups as files in a folder, and a process in one of them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc = folder / "root", folder / "proc"
        self.proc.mkdir()

    def process(self, *groups: str, mounts: tuple[str, ...]) -> None:
        (self.proc / "cgroup").write_text("".join(f"{group}\n" for group in groups))
        (self.proc / "mountinfo").write_text("".join(f"{mount}\n" for mount in ("1 0 0:1 / / rw - ext4 x rw", *mounts)))

    def v2(self, folder: str, quota: str | None) -> None:
        path = self.root / folder.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        if quota is not None:  # the topmost group has no such file
            (path / "cpu.max").write_text(f"{quota}\n")

    def v1(self, folder: str, quota: int, period: int = 100_000) -> None:
        path = self.root / folder.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        (path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (path / "cpu.cfs_period_us").write_text(f"{period}\n")

    def quota(self) -> float | None:
        return cpu_quota(self.proc, self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("top", "middle", "own", "quota"),
    [
        (None, "max 100000", "max 100000", None),
        (None, "max 100000", "150000 100000", 1.5),
        (None, "200000 100000", "max 100000", 2.0),
        (None, "200000 100000", "800000 100000", 2.0),
        (None, "800000 100000", "20000 50000", 0.4),
        ("300000 100000", "max 100000", "max 100000", 3.0),
    ],
)
def test_of_version_2_the_least_of_all_groups_above_counts(
    machine: Machine, top: str | None, middle: str, own: str, quota: float | None
) -> None:
    machine.process("0::/pods/one", mounts=(V2.format(group="/", at=AT),))
    for folder, text in ((AT, top), (f"{AT}/pods", middle), (f"{AT}/pods/one", own), (f"{AT}/pods/two", "1000 100000")):
        machine.v2(folder, text)
    assert machine.quota() == quota


@pytest.mark.parametrize(
    ("top", "middle", "own", "quota"), [(-1, -1, -1, None), (-1, -1, 50_000, 0.5), (-1, 250_000, 400_000, 2.5)]
)
def test_so_it_does_of_version_1(machine: Machine, top: int, middle: int, own: int, quota: float | None) -> None:
    at = f"{AT}/cpu,cpuacct"
    mounts = (OTHER_V1, V1.format(group="/", at=at))
    machine.process("9:name=systemd:/x", "5:memory:/elsewhere", "4:cpu,cpuacct:/docker/1", "3:cpuset:/y", mounts=mounts)
    for folder, value in ((at, top), (f"{at}/docker", middle), (f"{at}/docker/1", own), (f"{at}/docker/2", 1000)):
        machine.v1(folder, value)
    assert machine.quota() == quota


def test_a_period_of_its_own_counts(machine: Machine) -> None:
    machine.process("4:cpu:/", mounts=(V1.format(group="/", at=f"{AT}/cpu"),))
    machine.v1(f"{AT}/cpu", 30_000, 20_000)
    assert machine.quota() == 1.5


@pytest.mark.parametrize("group", ["/docker/1", "/"], ids=["the host's name", "a name space"])
def test_a_container_finds_its_group_at_the_top(machine: Machine, group: str) -> None:
    """A container sees its own groups alone; by the host's names, or by names that begin there."""
    mounts = (V2.format(group=group, at=AT), V1.format(group=group, at=f"{AT}/cpu"))
    machine.process(f"4:cpu:{group}", f"0::{group}", mounts=mounts)
    machine.v2(AT, "max 100000")
    machine.v1(f"{AT}/cpu", 350_000)
    assert machine.quota() == 3.5


def test_a_group_inside_a_container_is_found_below_it(machine: Machine) -> None:
    machine.process("0::/docker/1/inner", mounts=(V2.format(group="/docker/1", at=AT),))
    machine.v2(AT, "400000 100000")
    machine.v2(f"{AT}/inner", "100000 100000")
    machine.v2(f"{AT}/docker/1/inner", "1000 100000")  # of another one
    assert machine.quota() == 1.0


def test_a_group_that_is_not_seen_has_those_at_the_top(machine: Machine) -> None:
    machine.process("0::/kubepods/burstable/1", mounts=(V2.format(group="/", at=AT),))
    machine.v2(AT, "200000 100000")
    assert machine.quota() == 2.0


def test_both_versions_at_once(machine: Machine) -> None:
    mounts = (V1.format(group="/", at=f"{AT}/cpu"), V2.format(group="/", at=f"{AT}/unified"))
    machine.process("1:cpu:/a", "0::/b", mounts=mounts)
    machine.v1(f"{AT}/cpu/a", 400_000)
    machine.v2(f"{AT}/unified/b", "250000 100000")
    assert machine.quota() == 2.5


def test_a_mounted_place_may_have_spaces_in_its_name(machine: Machine) -> None:
    machine.process("0::/", mounts=(V2.format(group="/", at="/my\\040groups"),))
    machine.v2("/my groups", "100000 100000")
    assert machine.quota() == 1.0


def test_without_control_groups_there_is_no_quota(machine: Machine) -> None:
    assert machine.quota() is None
    machine.process(mounts=())
    assert machine.quota() is None


@pytest.fixture
def quota_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(cores, "cores_allowed", lambda: set(range(8)))
    yield monkeypatch
    share_quota(1)


@pytest.mark.parametrize(
    ("quota", "num_sharing", "threads"),
    [(None, 1, 8), (0.2, 1, 1), (1.0, 1, 1), (1.9, 1, 1), (2.0, 1, 2), (6.5, 1, 6), (8.0, 1, 8), (64.0, 1, 8),
     (None, 2, 8), (6.5, 2, 3), (4.0, 8, 1), (64.0, 2, 8)],
)  # fmt: skip
def test_threads_are_the_smaller_of_both_at_least_one(
    quota_of: pytest.MonkeyPatch, quota: float | None, num_sharing: int, threads: int
) -> None:
    quota_of.setattr(cores, "cpu_quota", lambda: quota)
    share_quota(num_sharing)
    assert available_cores() == threads
    assert default_host_threads(CPU) == max(1, threads // 2)
    assert CoreSplit(device=CPU, device_threads=None, host_threads=0).threads_alone == threads
    assert CoreSplit(device=CPU, device_threads=5, host_threads=0).threads_alone == 5, "asked for"
    note = quota_note()
    assert (note is None) == (threads == 8)
    assert note is None or (f"{quota:g} cores" in note and f"{threads} of the 8 cores" in note)


class Others:
    """Other processes, which use a given number of cores."""

    def __init__(self, number: float) -> None:
        self.number = number

    def cores(self) -> float:
        return self.number


@pytest.mark.parametrize(("used", "threads"), [(0.0, 4), (3.9, 4), (5.3, 3), (20.0, 1)])
def test_others_first_use_the_cores_that_the_quota_leaves(
    quota_of: pytest.MonkeyPatch, used: float, threads: int
) -> None:
    quota_of.setattr(cores, "cpu_quota", lambda: 4.0)
    before = torch.get_num_threads()
    try:
        split = CoreSplit(device=CPU, device_threads=None, host_threads=0, others=Others(used))  # type: ignore[arg-type]
        split.apply(host_works=False)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def _make_group(name: str, cores_of_quota: float) -> Path | None:
    """Make a control group with a quota, and one without below it; None where that is not possible or not allowed."""
    for top, version in ((Path(AT) / "cpu", 1), (Path(AT), 2)):
        if not (top / ("cpu.cfs_quota_us" if version == 1 else "cgroup.subtree_control")).exists():
            continue
        try:
            (top / name / "below").mkdir(parents=True)
            if version == 1:
                (top / name / "cpu.cfs_quota_us").write_text(f"{round(cores_of_quota * 100_000)}")
            else:
                (top / name / "cpu.max").write_text(f"{round(cores_of_quota * 100_000)} 100000")
        except OSError:
            _remove_group(top / name)
            continue
        return top / name
    return None


def _remove_group(folder: Path) -> None:
    for path in (folder / "below", folder):
        if path.is_dir():
            path.rmdir()


@pytest.mark.slow
def test_a_real_quota_of_a_group_above_bounds_a_process_and_its_children() -> None:
    allowed = len(os.sched_getaffinity(0))
    if allowed < 2:
        pytest.skip("one core has no half")
    group = _make_group(f"omniserve-test-{uuid.uuid4().hex}", allowed / 2)
    if group is None:
        pytest.skip("control groups with a CPU quota cannot be made here")
    code = "from omniserve.host.cores import available_cores; print(available_cores())"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True); {code}"

    def enter() -> None:
        (group / "below" / "cgroup.procs").write_text(str(os.getpid()))

    try:
        done = subprocess.run(
            [sys.executable, "-c", nested], preexec_fn=enter, capture_output=True, text=True, check=True, timeout=300
        )
    finally:
        _remove_group(group)
    assert done.stdout.split() == [str(allowed // 2)] * 2

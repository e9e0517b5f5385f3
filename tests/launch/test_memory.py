"""Tests of the memory that is left: the machine's and each control group's word, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniserve.launch.memory import available_bytes

MIB = 1 << 20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8192 kB\nMemFree: 1024 kB\nMemAvailable: 4096 kB\n")
    return tmp_path / "proc"


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_groups_the_machine_says_it(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 4 * MIB


def test_the_tightest_group_on_the_way_up_counts_and_caches_are_free(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    root = tmp_path / "cgroup"
    group(root / "outer" / "inner", memory__max="max", memory__current=str(MIB))
    assert available_bytes(proc, root) == 4 * MIB
    group(
        root / "outer",
        memory__max=str(3 * MIB),
        memory__current=str(2 * MIB),
        memory__stat=f"anon 5\ninactive_file {MIB}",
    )
    assert available_bytes(proc, root) == 2 * MIB
    group(root / "outer", memory__current=str(9 * MIB))
    assert available_bytes(proc, root) == 0


def test_version_1_of_control_groups(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("9:cpu,cpuacct:/x\n4:memory:/not/mounted/here\n0::/\n")
    root = tmp_path / "cgroup"
    group(
        root / "memory", memory__limit_in_bytes=str(2 * MIB), memory__usage_in_bytes=str(MIB),
        memory__stat=f"total_inactive_file {MIB // 2}",
    )  # fmt: skip
    assert available_bytes(proc, root) == 3 * MIB // 2


def test_a_system_without_proc_has_all_its_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) > MIB

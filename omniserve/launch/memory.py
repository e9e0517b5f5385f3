"""The main memory that this process may still take, in bytes. Plain files, no torch."""

from __future__ import annotations

import os
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the least of what the machine and each control group of this process have left; caches count as free.

    Where the system does not say (not Linux), all of the machine's memory.
    """
    return min([_machine_bytes(proc), *_group_bytes(proc, cgroups)])


def _machine_bytes(proc: Path) -> int:
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())["MemAvailable"]
    return int(kib.split()[0]) * 1024


def _group_bytes(proc: Path, cgroups: Path) -> list[int]:
    """Return what is left in each group, from the process's own up to the root, that has a limit."""
    membership = proc / "self" / "cgroup"
    left = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's, of which nothing is mounted but the root.
        for folder in [each for each in (group, *group.parents) if each.is_relative_to(root)]:
            limit = _read(folder / names[0])
            if limit.isdigit():
                stat = dict(entry.split() for entry in _read(folder / "memory.stat").splitlines())
                used = int(_read(folder / names[1]) or 0) - int(stat.get(names[2], 0))
                left.append(max(0, int(limit) - used))
    return left


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""

"""CPU quotas of control groups: how much time of cores a container may use, whatever cores it may run on.

A process that has used its quota stands still until the next period, of 0.1 s mostly. So a step with more threads than
the quota has cores is not faster, but stops in its middle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def cpu_quota(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> float | None:
    """Return how many cores this process may use at a time on average; None: as many as it may run on.

    That is the least of the quotas of its control group and of all groups above it, of both versions of control groups,
    as far as they can be seen from here. It is read from ``proc``; ``root`` is before the names of all folders.
    """
    quotas = [quota for folder in _folders(proc, root) for quota in (_read_v2(folder), _read_v1(folder))]
    return min((quota for quota in quotas if quota is not None), default=None)


def _folders(proc: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may hold a CPU quota, and of those above them."""
    paths = _group_paths(proc)
    for mounted_at, group_of_mount, controllers in _mounts(proc):
        for controller in controllers & paths.keys():
            top = root / mounted_at.lstrip("/")
            below = _below(paths[controller], group_of_mount)
            folder = top / below
            # A container that does not see the host's groups finds its own at the top, by whatever name.
            folder = folder if folder.is_dir() else top
            yield folder
            yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _group_paths(proc: Path) -> dict[str, str]:
    """Return the path of this process's group by controller: ``cpu`` of version 1, the empty name of version 2."""
    paths: dict[str, str] = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys({"cpu", ""} & set(controllers.split(",")), path)
    return paths


def _mounts(proc: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Yield where control groups are mounted, which group is at that place, and what controllers they have."""
    for line in _lines(proc / "mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(" ", 2), "", ""][:3]
        group, mounted_at = (_unescape(field) for field in fields.split(" ")[3:5])
        if kind == "cgroup2":
            yield mounted_at, group, {""}
        elif kind == "cgroup" and "cpu" in options.split(","):
            yield mounted_at, group, {"cpu"}


def _below(path: str, group_of_mount: str) -> str:
    """Return a group's path from the group that is at the mounted place."""
    top = group_of_mount.rstrip("/")
    below = path.removeprefix(top) if path == top or path.startswith(f"{top}/") else path
    return below.strip("/")


def _read_v2(folder: Path) -> float | None:
    for line in _lines(folder / "cpu.max"):
        quota, period = line.split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def _read_v1(folder: Path) -> float | None:
    quota, period = (_lines(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it does not exist."""
    return path.read_text().splitlines() if path.exists() else []


def _unescape(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)

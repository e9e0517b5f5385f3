"""Memory and open files that the processes of a server hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Held:
    """The resources that a server holds at a moment."""

    api_bytes: int
    """Resident memory of the process that answers."""
    engine_bytes: int
    """Resident memory of the engine's process."""
    num_files: int
    """Open files of the process that answers, connections included."""


def held(server: Any) -> Held:
    """Return what a server holds now."""
    api = server.process.pid
    return Held(_resident_bytes(api), _resident_bytes(engine_pid(server)), len(list(Path(f"/proc/{api}/fd").iterdir())))


def engine_pid(server: Any) -> int:
    """Return the id of a server's engine process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
    programs = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid, parent in parents.items()
        if parent == server.process.pid
    }
    # A server forks engines from a child that has imported torch; one made for a test spawns them.
    forkers = [pid for pid, program in programs.items() if b"forkserver" in program]
    engines = [pid for pid, parent in parents.items() if parent in forkers]
    engines += [pid for pid, program in programs.items() if b"spawn_main" in program]
    assert len(engines) == 1
    return engines[0]


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

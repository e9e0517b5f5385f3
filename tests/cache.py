"""Files under ``.cache/`` that processes of one run, and later runs, share instead of making them again."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".cache"


def digest_of(*parts: object) -> str:
    """Return a name for all that a file depends on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time look for a file and make it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def put(path: Path, make: Callable[[Path], object]) -> Path:
    """Make a file under a temporary name, so that there is a whole one or none."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    make(unfinished)
    unfinished.replace(path)
    return path

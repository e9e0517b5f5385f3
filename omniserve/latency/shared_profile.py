"""SharedProfile: the latency profile that a server's engines with equal shares of one machine measure once."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from omniserve.latency.profile import Fingerprint, Profile, load_matching, path_in, read_matching

logger = logging.getLogger(__name__)


class SharedProfile:
    """Finds what another engine of the same server has measured, and lets one of them measure at a time.

    A server's first engine starts alone. What it measures is written beside the kept profiles even if it is coarse or
    if others kept the machine busy. Only engines of the same server take such a profile.

    Args:
        folder: Where profiles are kept.
        fingerprint: What the profile must have been made for; engines with unequal shares have different ones.
        since_s: Unix time before which the server made no engine: what was written earlier is another server's.
        patience_s: Seconds that an engine waits for its turn to measure; then it measures beside the other.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        since_s: float,
        *,
        patience_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._fingerprint, self._since_s = folder, fingerprint, since_s
        self._patience_s, self._clock = patience_s, clock
        self._waits_since_s: float | None = None
        self._lock: int | None = None
        kept_at = path_in(folder, fingerprint)
        self._path, self._lock_path = kept_at.with_suffix(".server.json"), kept_at.with_suffix(".lock")

    def find(self) -> Profile | None:
        """Return the profile that is kept, or else the newest one of this server's engines; None if there is none."""
        kept = load_matching(self._folder, self._fingerprint)
        if kept is not None or not self._path.exists() or self._path.stat().st_mtime < self._since_s:
            return kept
        return read_matching(self._path, self._fingerprint)

    def tell(self, profile: Profile) -> None:
        """Let the server's other engines find a profile that this one has measured."""
        try:
            profile.write(self._path)
        except OSError as error:
            logger.warning("each engine of this server measures its own latency profile: %s", error)

    def begin(self) -> bool:
        """Return whether this engine may measure now; if so, ``end`` is to be called after it."""
        if self._lock is not None:
            return True
        now_s = self._clock()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        try:
            self._lock = self._locked()
        except BlockingIOError:
            return now_s - self._waits_since_s > self._patience_s
        except OSError as error:  # such as a file system without locks
            logger.warning("engines of this server do not take turns to measure latency profiles: %s", error)
            return True
        self._waits_since_s = None
        return True

    def _locked(self) -> int:
        """Open and lock the file; return its descriptor.

        Raises:
            BlockingIOError: Another engine has locked it.
            OSError: It cannot be made, or cannot be locked.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return lock

    def end(self) -> None:
        """Let the next engine measure."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for a child process that has inherited it
            os.close(self._lock)
            self._lock = None

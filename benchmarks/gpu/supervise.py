"""Runs workers until every part was measured, cut or skipped, and keeps what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.record import ROOT
from benchmarks.gpu.table import NOT_MEASURED, Row, row_of

_POLL_S = 0.2
_START_S = 60.0
_INTERRUPT_S = 3.0


@dataclass
class Outcome:
    """What is known of a part."""

    status: str = NOT_MEASURED
    """``measured``, ``failed: ...``, ``cut ...`` or ``not measured``."""
    limit_s: float = 0.0
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether something went wrong, other than the time."""
        return self.status.startswith("failed") or any(row.note.startswith("FAILED") for row in self.rows)

    def as_record(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        rows = [row.as_record() for row in self.rows]
        return {"status": self.status, "limit_s": self.limit_s, "seconds": self.seconds, "rows": rows}


class Supervisor:
    """Starts a worker for the parts that are left, again if one was ended.

    Args:
        names: Parts, in their order.
        ends_at_s: When all must be over, seconds since the epoch.
        dry: Tiny sizes.
        grace_s: How much longer than its time a part may take before it is cut.
        on_end: Called after each part with its name.
        worker: The command that is given the worker's arguments.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        ends_at_s: float,
        dry: bool,
        grace_s: float,
        on_end: Callable[[str], None],
        worker: Sequence[str] = (sys.executable, "-m", "benchmarks.gpu.worker"),
    ) -> None:
        self._names, self._ends_at_s, self._dry, self._grace_s = list(names), ends_at_s, dry, grace_s
        self._on_end = on_end
        self._worker = tuple(worker)
        self._unread = ""
        self.outcomes = {name: Outcome() for name in names}
        self._begun: dict[str, float] = {}
        self._ended: set[str] = set()

    def run(self) -> None:
        """Run all parts; come back at the end of the time at the latest."""
        while (left := self._left()) and time.time() < self._ends_at_s:
            with tempfile.TemporaryDirectory() as folder:
                self._run_worker(left, Path(folder) / "events")
            if self._left() == left:  # it did not even begin: another one would not either
                self.outcomes[left[0]].status = "failed: the worker ended before it began; see its output above"
                return

    def _left(self) -> list[str]:
        return [name for name in self._names if name not in self._begun]

    def _run_worker(self, names: Sequence[str], path: Path) -> None:
        path.touch()
        self._unread = ""
        command = [*self._worker, "--parts", ",".join(names), "--events", str(path)]
        command += ["--ends-at", str(self._ends_at_s), *(["--dry"] if self._dry else [])]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        started_s = time.monotonic()
        reason = ""
        with path.open() as events:
            while process.poll() is None and not reason:
                self._read(events.read())
                reason = self._why_cut(started_s)
                if not reason:
                    time.sleep(_POLL_S)
            if reason:
                _end(process)
            self._read(events.read())
        for name in self._begun.keys() - self._ended:
            self._ended.add(name)
            outcome = self.outcomes[name]
            outcome.seconds = time.monotonic() - self._begun[name]
            outcome.status = f"cut {reason}" if reason else f"failed: the worker ended with status {process.returncode}"
            self._on_end(name)

    def _read(self, text: str) -> None:
        *lines, self._unread = (self._unread + text).split("\n")  # the last one may not be whole yet
        for line in lines:
            event = json.loads(line)
            name = event["part"]
            outcome = self.outcomes[name]
            if event["event"] == "begin":
                self._begun[name] = time.monotonic()
                outcome.limit_s = event["limit_s"]
            elif event["event"] == "row":
                outcome.rows.append(row_of(event["row"]))
            else:
                outcome.status, outcome.seconds = event["status"], event["seconds"]
                self._ended.add(name)
                self._on_end(name)

    def _why_cut(self, started_s: float) -> str:
        """Return why the worker must be ended now; empty: it may go on."""
        running = self._begun.keys() - self._ended
        for name in running:
            if time.monotonic() - self._begun[name] > self.outcomes[name].limit_s + self._grace_s:
                return f"after its {self.outcomes[name].limit_s:.0f} s"
        if time.time() > self._ends_at_s + self._grace_s:
            return "at the end of the run"
        if not running and not self._begun and time.monotonic() - started_s > _START_S:
            return "before it began"
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and what it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile
        try:
            process.wait(_INTERRUPT_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()

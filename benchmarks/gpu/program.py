"""A program beside this one: its output, its status, and its end in any case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from benchmarks.common.record import ROOT


class Program:
    """Starts a program; as a context manager, ends it and all that it started.

    Args:
        command: The program and its arguments.
        environment: None: this process's own.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.began_s = time.monotonic()
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # a pipe that nobody reads would stop it
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._output.close()

    def wait(self, limit_s: float) -> tuple[int, str, bool]:
        """Wait for its end, for so long; return its status, its output, and whether it was killed then."""
        was_cut = False
        try:
            self._process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            was_cut = True
            self._end()
        self._output.seek(0)
        return self._process.returncode, self._output.read(), was_cut

    def kill(self) -> None:
        """Kill it, and all that it started and that still runs; waits for nothing."""
        with contextlib.suppress(ProcessLookupError):  # they all ended by themselves
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self.kill()
        self._process.wait()

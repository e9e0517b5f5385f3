"""run_program: a program with a time limit."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence

from benchmarks.common.record import ROOT

GRACE_S = 5.0
"""From SIGABRT, at which Python shows the stacks of all threads, to SIGKILL."""
_KEPT_LINES = 2000


def run_program(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None, echo: bool = False
) -> tuple[int | None, list[str]]:
    """Run a program in the repository's root; coreutils' ``timeout`` ends it, with all that it started, at its limit.

    Args:
        command: The program and its arguments.
        limit_s: Its time.
        environment: What its environment has beside this process's.
        echo: Print its output as it comes.

    Returns:
        Its exit status, None if it was ended, and the last lines of its output and errors.
    """
    began_s = time.monotonic()
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        ["timeout", "--signal=ABRT", f"--kill-after={GRACE_S}", str(limit_s), *command], cwd=ROOT,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"} | dict(environment or {}), text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if echo:
                print(line, end="", flush=True)
    # What timeout ends has these statuses; a program that the kernel killed for its memory has one of them sooner.
    ended = process.returncode in (124, 137, -9) and time.monotonic() - began_s >= limit_s
    return None if ended else process.returncode, list(lines)

"""run_program: a program with a time limit, and its end in any case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from benchmarks.common.record import ROOT

_GRACE_S = 5.0
_KEPT_LINES = 2000


def run_program(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None, echo: bool = False
) -> tuple[int | None, list[str]]:
    """Run a program in the repository's root and end it, with all that it started, if it takes too long.

    It is interrupted first, so that Python shows where it was, then aborted (with ``PYTHONFAULTHANDLER`` that shows the
    stacks of all threads, also from within a CUDA call), then killed.

    Args:
        command: The program and its arguments.
        limit_s: Its time.
        environment: What its environment has beside this process's.
        echo: Print its output as it comes.

    Returns:
        Its exit status, None if it was ended, and the last lines of its output and errors.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONFAULTHANDLER": "1"} | dict(environment or {}), text=True,
        errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if echo:
                print(line, end="", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    status = None
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGINT, signal.SIGABRT):
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.kill(process.pid, number)
                process.wait(_GRACE_S)
                break
    finally:  # also when this process is interrupted; what the program started is in its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(_GRACE_S)
    return status, list(lines)

"""Script: a part's device, and a record that grows case by case; programs with a time limit."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import ROOT, write_record
from benchmarks.gpu.limits import Limits

GRACE_S = 5.0
"""Seconds from SIGABRT, at which Python shows the stacks of all threads, to SIGKILL."""


class NotHere(Exception):
    """A case cannot run on this machine; the message says why."""


@dataclass(kw_only=True)
class Case:
    """A check or a figure, as the record has it."""

    case: str
    outcome: str = "PASS"
    """``PASS``, ``FAIL`` or ``SKIP``; ``note`` says why."""
    measured: float | None = None
    unit: str = ""
    limit: float | None = None
    """The hardware's limit, or the value that this one is compared with, in the same unit."""
    ratio: float | None = None
    """Measured over limit."""
    goal: str = ""
    """The goal for the ratio, or for ``measured`` where there is no limit."""
    met: bool | None = None
    note: str = ""
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def figure(
        self, measured: float, unit: str, *, limit: float | None = None, at_most: float | None = None,
        at_least: float | None = None, note: str = "", **details: Any,
    ) -> None:  # fmt: skip
        """Set what was measured, its limit and its goal (``at_most`` or ``at_least``)."""
        self.measured, self.unit, self.limit, self.note = measured, unit, limit, note
        self.ratio = measured / limit if limit else None
        self.details |= details
        compared = measured if self.ratio is None else self.ratio
        if at_most is not None:
            self.goal, self.met = f"<= {at_most:g}", compared <= at_most
        if at_least is not None:
            self.goal, self.met = f">= {at_least:g}", compared >= at_least


class Script:
    """The run of a part; its record is written after every case, so that a crash or time limit cuts off only the
    rest."""

    def __init__(self, name: str, *, dry: bool, out: Path) -> None:
        logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s %(message)s")
        self.name, self.dry = name, dry
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.cases: list[Case] = []
        self._record = out / f"gpu_{name}.json"

    @functools.cached_property
    def limits(self) -> Limits:
        """The hardware's limits, measured when first asked for."""
        return Limits(self.device, dry=self.dry)

    def needs_gpu(self) -> None:
        """Raise NotHere without a GPU."""
        if not self.on_gpu:
            raise NotHere("needs a GPU")

    @contextmanager
    def case(self, name: str) -> Iterator[Case]:
        """Run the body as one case: what it raises is this case's outcome, and the script goes on."""
        case, began_s = Case(case=name), time.perf_counter()
        try:
            yield case
        except NotHere as reason:
            case.outcome, case.note = "SKIP", str(reason)
        except Exception as error:
            case.outcome, case.note = "FAIL", scrubbed(f"{type(error).__name__}: {error}").strip()
            case.details["traceback"] = scrubbed(traceback.format_exc()).splitlines()[-60:]
            traceback.print_exc()
        case.seconds = time.perf_counter() - began_s
        self.cases.append(case)
        value = "" if case.measured is None else f": {short(case.measured)} {case.unit}"
        limit = "" if case.ratio is None else f" ({short(case.ratio)} x {short(case.limit)})"
        note = case.note and f": {case.note.splitlines()[0]}"
        print(f"{case.outcome}  {case.case}{value}{limit}{note} [{case.seconds:.1f} s]", flush=True)
        results = {"cases": [vars(case) for case in self.cases]}
        write_record(self._record, name=f"gpu_{self.name}", config={"dry": self.dry}, seed=0, results=results)


def short(value: float | None) -> str:
    """Return a number with as many digits as mean something."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def scrubbed(text: str) -> str:
    """Return a text whose absolute paths begin at the repository's root, or are a file's name alone."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w./])/(?:[\w.+@~-]+/)+", ".../", text)


def run_program(
    command: Sequence[str | Path], *, limit_s: float, environment: Mapping[str, str] | None = None, echo: bool = False
) -> tuple[int | None, list[str]]:
    """Run a program in the repository's root; coreutils' ``timeout`` ends it, with all that it started, at its limit.

    Returns:
        Its exit status, None if it was ended, and the last lines of its output and errors.
    """
    began_s = time.monotonic()
    lines: deque[str] = deque(maxlen=2000)
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

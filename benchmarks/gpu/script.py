"""Script: a part's device, its limits, and a record that grows case by case; programs with a time limit."""

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

from benchmarks.common.bandwidth import Arena, allowed_cpus, fill, normal_tile, pin_team, sequential_readings
from benchmarks.common.record import ROOT, write_record
from benchmarks.common.timing import graph_of, median_seconds

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


class Limits:
    """Rates that other figures are compared with; ``dry``: of tiny sizes."""

    def __init__(self, device: torch.device, *, dry: bool) -> None:
        from omniserve.host.cores import default_host_threads  # loads the extension, which may be what is broken

        self.device, self._dry, self._repeats = device, dry, 3 if dry else 10
        self.host_threads = default_host_threads(device)

    @functools.cached_property
    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written a second by a copy inside the device's memory."""
        source = torch.empty(1 << (20 if self._dry else 32), dtype=torch.uint8, device=self.device).random_(0, 255)
        target = torch.empty_like(source)
        return 2 * len(source) / median_seconds(lambda: target.copy_(source), self.device, repeats=self._repeats)

    @functools.cached_property
    def matmul_flops(self) -> float:
        """Floating-point operations a second of a square bf16 product of random matrices."""
        size = 256 if self._dry else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / median_seconds(lambda: a @ b, self.device, repeats=self._repeats, warm_up=3)

    @functools.cached_property
    def to_device_bytes_per_s(self) -> float:
        """Bytes a second from page-locked memory to the device, in one piece."""
        return self._transfer(to_host=False)

    @functools.cached_property
    def to_host_bytes_per_s(self) -> float:
        """Bytes a second from the device to page-locked memory, in one piece."""
        return self._transfer(to_host=True)

    def _transfer(self, *, to_host: bool) -> float:
        count = 1 << (20 if self._dry else 30)
        host = torch.ones(count, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        device = torch.ones(count, dtype=torch.uint8, device=self.device)
        source, target = (device, host) if to_host else (host, device)
        copy = functools.partial(target.copy_, source, non_blocking=True)
        return count / median_seconds(copy, self.device, repeats=self._repeats)

    def launch_s(self, *, in_graph: bool) -> float:
        """Return the seconds of a small kernel, one after the other, launched from Python or in a CUDA graph."""
        x, count = torch.zeros(1, device=self.device), 200

        def run() -> None:
            for _ in range(count):
                x.add_(1.0)

        timed = graph_of(run, self.device) if in_graph else run
        return median_seconds(timed, self.device, repeats=self._repeats) / count

    @functools.cached_property
    def host_read_bytes_per_s(self) -> float:
        """Bytes a second that as many threads as the host tier has read from main memory."""
        cpus = allowed_cpus()
        threads = min(self.host_threads, len(cpus))
        arena = Arena(1 << (24 if self._dry else 32))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            pin_team(cpus[:threads])
            fill(arena.bytes, normal_tile(torch.bfloat16, 0), threads)
            readings = sequential_readings(arena.num_bytes, threads)
            return 1e9 * max(reading.gb_per_s(arena, threads) for reading in readings for _ in range(2))
        finally:
            os.sched_setaffinity(0, cpus)
            torch.set_num_threads(before)


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

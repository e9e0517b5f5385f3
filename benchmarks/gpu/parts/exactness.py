"""Is it right on this device? The tests marked ``gpu``, and every kernel once under compute-sanitizer."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu.bench import Bench, Measured, NotHere
from benchmarks.gpu.outcome_log import VARIABLE
from benchmarks.gpu.program import Program
from benchmarks.gpu.table import Goal

Start = Callable[..., Program]

SUITE = ("tests/parity", "tests/graphs", "tests/ops", "tests/host", "tests/engine", "tests/latency")
"""Every folder with a test marked ``gpu``; what matters most first, for the time may be too short."""
DRY_SUITE = ("tests/ops/test_linear.py",)
TOOLS = ("memcheck", "racecheck")
_KERNELS = ("-m", "benchmarks.gpu.kernels_once")
_WORKERS = "8"
_TO_REPORT_S = 3.0


def run(bench: Bench) -> None:
    """Run the tests, the kernels alone, and these under each sanitizer, all at once: nothing here is timed."""
    goal = Goal(at_most=0, of="measured")
    started: list[Program] = []
    with ExitStack() as stack:

        def start(command: list[str], environment: dict[str, str] | None = None) -> Program:
            program = stack.enter_context(Program(command, environment))
            started.append(program)
            return program

        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "outcomes"
        log.touch()
        tests = _start_tests(bench, start, log)
        kernels = start([sys.executable, *_KERNELS])
        checked = {tool: _start_sanitizer(bench, tool, start) for tool in TOOLS}
        stack.callback(_kill, started)  # all of them, before any is waited for
        bench.take("tests, failed", "tests", lambda: _failed(tests, log, _left_s(bench)), goal=goal)
        bench.take("every kernel once: status", "", lambda: _status(kernels, _left_s(bench)), goal=goal)
        for tool, program in checked.items():
            bench.take(
                f"compute-sanitizer {tool}: errors", "errors",
                functools.partial(_errors, program, bench), goal=goal,
            )  # fmt: skip


def _kill(programs: list[Program]) -> None:
    for program in programs:
        program.kill()


def _left_s(bench: Bench) -> float:
    return bench.left_s - _TO_REPORT_S


def _start_tests(bench: Bench, start: Start, log: Path) -> Program:
    """Return the tests under way; ``log`` gets their outcomes."""
    paths = DRY_SUITE if bench.dry else SUITE
    options = ["-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.outcome_log", "--continue-on-collection-errors"]
    if bench.on_gpu:
        options += ["-m", "gpu"]
        if importlib.util.find_spec("xdist") is not None:
            options += ["-n", _WORKERS]
    return start([sys.executable, "-m", "pytest", *options, *paths], os.environ | {VARIABLE: str(log)})


def _failed(tests: Program, log: Path, limit_s: float) -> Measured:
    """Return how many tests failed or could not run, and what ran."""
    status, output, was_cut = tests.wait(limit_s)
    if status not in (0, 1) and not was_cut:
        raise RuntimeError(f"pytest ended with status {status}: {output[-300:]}")
    return summary(log, was_cut=was_cut)


def summary(log: Path, *, was_cut: bool) -> Measured:
    """Return how many tests failed, from what ``outcome_log`` wrote.

    Raises:
        NotHere: No test ran, or none failed of those that did before the time was over.
    """
    outcomes: dict[str, str] = {}
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if outcomes.get(event["test"]) != "failed":  # what passed may still fail at its end
            outcomes[event["test"]] = event["outcome"]
    counts = Counter(outcomes.values())
    note = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    if was_cut:
        note += ", cut: out of time"
    if not counts["passed"] and not counts["failed"]:
        raise NotHere(f"no test ran: {note}")
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    if was_cut and not failed:
        raise NotHere(note)
    return Measured(value=float(len(failed)), note=note, details={"failed": failed, "cut": was_cut})


def _status(program: Program, limit_s: float) -> Measured:
    status, output, was_cut = program.wait(limit_s)
    if was_cut:
        raise NotHere(f"not over after {time.monotonic() - program.began_s:.0f} s")
    return Measured(value=float(status), note=(output.strip().splitlines() or [""])[-1])


def _start_sanitizer(bench: Bench, tool: str, start: Start) -> Program | str:
    """Return the kernels under way under a sanitizer, or why there is none."""
    if not bench.on_gpu:
        return "needs a GPU"
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        return "there is no compute-sanitizer here"
    # The caching allocator hides reads behind the end of a tensor.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return start([program, "--tool", tool, "--print-limit", "5", sys.executable, *_KERNELS, "--few"], environment)


def _errors(program: Program | str, bench: Bench) -> Measured:
    if isinstance(program, str):
        raise NotHere(program)
    status, output, was_cut = program.wait(_left_s(bench))
    if was_cut:
        raise NotHere(f"not over after {time.monotonic() - program.began_s:.0f} s")
    found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    if "Device not supported" in output:
        raise NotHere("compute-sanitizer does not support this device, or how it is virtualised")
    if found is None:
        raise RuntimeError(f"no summary, status {status}: {output[-300:]}")
    if status != 0 and not int(found[1] or found[2]):
        raise RuntimeError(f"the program ended with status {status}: {output[-300:]}")
    return Measured(value=float(found[1] or found[2]), note=found[0], details={"end_of_output": output[-2000:]})

"""Is it right on this device? The tests marked ``gpu``, and every kernel once under compute-sanitizer."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.common.record import ROOT
from benchmarks.gpu.bench import Bench, Measured, NotHere
from benchmarks.gpu.outcome_log import VARIABLE
from benchmarks.gpu.table import Goal

SUITE = ("tests/ops", "tests/host", "tests/graphs", "tests/latency", "tests/engine", "tests/parity")
"""Every folder with a test marked ``gpu``."""
DRY_SUITE = ("tests/ops/test_linear.py",)
TOOLS = ("memcheck", "racecheck")
_KERNELS = ("-m", "benchmarks.gpu.kernels_once")
_WORKERS = "8"
_SANITIZERS_SHARE = 0.35


def run(bench: Bench) -> None:
    """Run the tests, then the kernels alone, then these under each sanitizer in what is left."""
    bench.take(
        "tests, failed", "tests", functools.partial(_tests, bench, (1 - _SANITIZERS_SHARE) * bench.left_s),
        goal=Goal(at_most=0, of="measured"), needs_s=5.0,
    )  # fmt: skip
    bench.take(
        "every kernel once: status", "", lambda: _status([sys.executable, *_KERNELS], bench.left_s / 2),
        goal=Goal(at_most=0, of="measured"), needs_s=5.0,
    )  # fmt: skip
    for number, tool in enumerate(TOOLS):
        limit_s = bench.left_s / (len(TOOLS) - number)
        bench.take(
            f"compute-sanitizer {tool}: errors", "errors",
            functools.partial(_sanitizer, bench, tool, limit_s),
            goal=Goal(at_most=0, of="measured"), needs_s=5.0,
        )  # fmt: skip


def _tests(bench: Bench, limit_s: float) -> Measured:
    """Return how many tests failed or could not run, and what ran."""
    paths = DRY_SUITE if bench.dry else SUITE
    options = ["-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.outcome_log", "--continue-on-collection-errors"]
    if bench.on_gpu:
        options += ["-m", "gpu"]
        if importlib.util.find_spec("xdist") is not None:
            options += ["-n", _WORKERS]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "outcomes"
        log.touch()
        command = [sys.executable, "-m", "pytest", *options, *paths]
        status, output, was_cut = run_for(command, limit_s, os.environ | {VARIABLE: str(log)})
        if status not in (0, 1) and not was_cut:
            raise RuntimeError(f"pytest ended with status {status}: {output[-300:]}")
        return summary(log, was_cut=was_cut)


def summary(log: Path, *, was_cut: bool) -> Measured:
    """Return how many tests failed, from what ``outcome_log`` wrote.

    Raises:
        NotHere: No test ran.
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
    return Measured(value=float(len(failed)), note=note, details={"failed": failed, "cut": was_cut})


def _status(command: list[str], limit_s: float) -> Measured:
    status, output, was_cut = run_for(command, limit_s)
    if was_cut:
        raise NotHere(f"not over after {limit_s:.0f} s")
    return Measured(value=float(status), note=(output.strip().splitlines() or [""])[-1])


def _sanitizer(bench: Bench, tool: str, limit_s: float) -> Measured:
    if not bench.on_gpu:
        raise NotHere("needs a GPU")
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise NotHere("there is no compute-sanitizer here")
    # The caching allocator hides reads behind the end of a tensor.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, "--tool", tool, "--print-limit", "5", sys.executable, *_KERNELS, "--few"]
    status, output, was_cut = run_for(command, limit_s, environment)
    if was_cut:
        raise NotHere(f"not over after {limit_s:.0f} s")
    found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    if "Device not supported" in output:
        raise NotHere("compute-sanitizer does not support this device, or how it is virtualised")
    if found is None:
        raise RuntimeError(f"no summary, status {status}: {output[-300:]}")
    if status != 0 and not int(found[1] or found[2]):
        raise RuntimeError(f"the program ended with status {status}: {output[-300:]}")
    return Measured(value=float(found[1] or found[2]), note=found[0], details={"end_of_output": output[-2000:]})


def run_for(command: list[str], limit_s: float, environment: dict[str, str] | None = None) -> tuple[int, str, bool]:
    """Run a program for so long; return its status, its output, and whether it, and what it had started, was killed.

    Args:
        command: The program and its arguments.
        limit_s: How long.
        environment: None: this process's own.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    was_cut = False
    try:
        output, _ = process.communicate(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        was_cut = True
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    finally:  # also if this process is interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output, was_cut

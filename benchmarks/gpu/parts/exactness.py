"""Is it right on this device? The tests marked ``gpu``, and every kernel once under compute-sanitizer."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.common.record import ROOT
from benchmarks.gpu.bench import Bench, Measured, NotHere
from benchmarks.gpu.table import Goal

SUITES = {
    "operators and host tier": ("tests/ops", "tests/host", "tests/kv", "tests/layers"),
    "engine": ("tests/engine",),
    "parity with transformers": ("tests/parity",),
}
DRY_SUITES = {"operators": ("tests/ops/test_index_ops.py",)}
TOOLS = ("memcheck", "racecheck")
_KERNELS = ("-m", "benchmarks.gpu.kernels_once")
_WORKERS = "4"
_END_S = 10.0
_SANITIZERS_SHARE = 0.4


def run(bench: Bench) -> None:
    """Run the suites, then the sanitizers; each gets an equal part of what is left."""
    suites = DRY_SUITES if bench.dry else SUITES
    for number, (name, paths) in enumerate(suites.items()):
        limit_s = (1 - _SANITIZERS_SHARE) * bench.left_s / (len(suites) - number)
        bench.take(
            f"tests: {name}, failed", "tests", functools.partial(_tests, bench, paths, limit_s),
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


def _tests(bench: Bench, paths: tuple[str, ...], limit_s: float) -> Measured:
    """Return how many tests failed or could not run, and what ran."""
    here = [path for path in paths if (ROOT / path).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", *here]
    if bench.on_gpu:
        command += ["-m", "gpu"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", _WORKERS]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        _, output, was_cut = run_for([*command, f"--junitxml={report}"], limit_s)
        if not report.exists():
            raise RuntimeError(f"pytest left no report within {limit_s:.0f} s: {output[-300:]}")
        return _summary(report, was_cut=was_cut)


def _summary(report: Path, *, was_cut: bool) -> Measured:
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in bad]
    passed = len(cases) - len(bad) - skipped
    note = f"{passed} passed, {len(bad)} failed, {skipped} skipped" + (", cut: out of time" if was_cut else "")
    if passed == 0 and not bad:
        raise NotHere("no test ran" + (", out of time" if was_cut else ""))
    return Measured(value=float(len(bad)), note=note, details={"failed": names, "cut": was_cut})


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
    if found is None:
        raise RuntimeError(f"no summary, status {status}: {output[-300:]}")
    if status != 0 and not int(found[1] or found[2]):
        raise RuntimeError(f"the program ended with status {status}: {output[-300:]}")
    return Measured(value=float(found[1] or found[2]), note=found[0], details={"end_of_output": output[-2000:]})


def run_for(command: list[str], limit_s: float, environment: dict[str, str] | None = None) -> tuple[int, str, bool]:
    """Run a program for so long; return its status, its output, and whether it was cut (by an interrupt, then killed).

    Args:
        command: The program and its arguments.
        limit_s: How long.
        environment: None: this process's own.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for send in (None, signal.SIGINT, signal.SIGKILL):
        if send is not None:
            process.send_signal(send)
        try:
            output, _ = process.communicate(timeout=max(1.0, limit_s) if send is None else _END_S)
            return process.returncode, output, send is not None
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError(f"{command[0]} does not end, not even killed")

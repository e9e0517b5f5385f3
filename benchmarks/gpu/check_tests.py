"""The project's own tests on this GPU: random histories, those marked ``gpu``, and kernels under compute-sanitizer."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.record import ROOT
from benchmarks.gpu.script import NotHere, Script, run_program, scrubbed

_HISTORIES_S, _TESTS_S, _TOOL_S = 90.0, 160.0, 60.0
_KERNELS = ("tests/ops/test_kernel_rows.py", "tests/ops/test_device_attention.py")
_MARKED = re.compile(r"mark\.gpu|\bDEVICES\b")
"""Text that shows tests marked ``gpu`` in a file; ``DEVICES`` are parameters of which one is so marked."""


def exactness(script: Script) -> None:
    """Serve random histories in fp32, all families and policies in turn; greedy tokens are Hugging Face's."""
    size = ["--seconds", "1", "--families", "llama"] if script.dry else ["--seconds", "60"]
    command = [sys.executable, "-m", "tests.parity.fuzz", "--device", script.device.type, *size]
    run_tests(script, "random histories", command, _HISTORIES_S)


def marked_tests(script: Script) -> None:
    """Run the tests marked ``gpu``; each one that fails is named, also when the time is too short for all."""
    files = [Path("tests/runner/test_shapes.py")] if script.dry else marked_files()
    has_xdist = importlib.util.find_spec("xdist") is not None and not script.dry
    command = [*_pytest(script), "-v", *(("-n", "8") if has_xdist else ()), *files]
    run_tests(script, f"tests marked gpu, in {len(files)} files", command, _TESTS_S)


def sanitizer(script: Script) -> None:
    """Run the kernels' tests under compute-sanitizer's memcheck and racecheck."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    # The caching allocator hides reads behind the end of a tensor.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", ".")}
    for tool in ("memcheck", "racecheck"):
        under = [program or "", "--tool", tool, "--error-exitcode", "86", "--print-limit", "5"]
        command = [*under, *_pytest(script), "-k", "not (flag or flex or graph)", *_KERNELS]
        missing = "needs a GPU" if not script.on_gpu else "" if program else "there is no compute-sanitizer here"
        run_tests(script, f"compute-sanitizer {tool}", command, _TOOL_S, environment, missing=missing)


def run_tests(
    script: Script, name: str, command: Sequence[str | Path], limit_s: float,
    environment: Mapping[str, str] | None = None, *, missing: str = "",
) -> None:  # fmt: skip
    """Run a program as a case, which fails with its status and names the tests that failed."""
    with script.case(name) as case:
        if missing:
            raise NotHere(missing)
        status, lines = run_program(command, limit_s=limit_s, environment=environment)
        failed = [line for line in lines if re.search(r"\b(FAILED|ERROR)\b(?! SUMMARY)", line)]
        output = scrubbed("\n".join(lines[-400:]))
        case.details |= {"failed": failed, "status": status, "end_of_output": output}
        case.note = lines[-1].strip("= ") if lines else "nothing was said"
        if "Device not supported" in output:
            raise NotHere("compute-sanitizer does not support this device, or how it is virtualised")
        if status is None and not failed:
            raise NotHere(f"cut after {limit_s:.0f} s")
        assert status == 0 and not failed, f"{case.note}, status {status}: {', '.join(failed)}"


def marked_files() -> list[Path]:
    """Return the files with tests marked ``gpu``."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in paths if _MARKED.search(path.read_text())]


def _pytest(script: Script) -> list[str]:
    """Return the command that runs the tests marked ``gpu``; without a GPU, the others."""
    quiet = ["-rN", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return [sys.executable, "-m", "pytest", *quiet, "-m", "gpu" if script.on_gpu else "not gpu"]

"""The tests marked ``gpu``; each one that fails is named as it comes, also when the time is too short for all."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common.record import ROOT
from benchmarks.gpu.program import run_program
from benchmarks.gpu.script import NotHere, Script, argument_parser, scrubbed

_DRY = [Path("tests/runner/test_shapes.py")]
_OUTCOME = r"(PASSED|FAILED|ERROR|SKIPPED)"
_LINE = re.compile(rf"^(?:\[gw\d+\] \[ *\d+%\] {_OUTCOME} (tests/.+?)|(tests/.+?) {_OUTCOME})(?: +\[ *\d+%\])?\s*$")
"""A test's line of ``pytest -v``, with and without xdist."""
_MARKED = re.compile(r"mark\.gpu|\bDEVICES\b")
"""What a file with tests marked ``gpu`` contains; ``DEVICES`` are parameters of which one is so marked."""
_WORKERS = "8"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, seconds=(230.0, "for all tests"))
    script = Script("tests", args := parser.parse_args(arguments))
    command = [sys.executable, "-m", "pytest", "-v", "-rN", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "-m", "gpu" if script.on_gpu else "not gpu"]
    if importlib.util.find_spec("xdist") is not None and not script.dry:
        command += ["-n", _WORKERS]
    files = _DRY if script.dry else marked_files()
    with script.case(f"tests marked gpu, in {len(files)} files") as case:
        status, lines = run_program([*command, *map(str, files)], limit_s=args.seconds)
        outcomes = outcomes_of(lines)
        counts = Counter(outcomes.values())
        failed = sorted(test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR"))
        case.details |= {"failed": failed, "status": status, "end_of_output": scrubbed("\n".join(lines[-400:]))}
        counted = ", ".join(f"{number} {name.lower()}" for name, number in sorted(counts.items())) or "nothing ran"
        if status is None and not failed:
            raise NotHere(f"{counted}, then cut after {args.seconds:.0f} s: give this script more --seconds for all")
        assert status == 0 and not failed and counts["PASSED"], f"{counted}, status {status}: {', '.join(failed)}"
        case.note = counted
    return script.end()


def marked_files() -> list[Path]:
    """Return the files with tests marked ``gpu``."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in paths if _MARKED.search(path.read_text())]


def outcomes_of(lines: Iterable[str]) -> dict[str, str]:
    """Return each test's outcome; one that passed and whose end went wrong has failed."""
    outcomes: dict[str, str] = {}
    for line in lines:
        if match := _LINE.match(line):
            outcome, test = (match[1], match[2]) if match[1] else (match[4], match[3])
            if outcomes.get(test) not in ("FAILED", "ERROR"):
                outcomes[test] = outcome
    return outcomes


if __name__ == "__main__":
    sys.exit(main())

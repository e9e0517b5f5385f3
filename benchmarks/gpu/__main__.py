"""Everything about this project that only a GPU can tell: first what is broken, then how fast the rest is.

    benchmarks/gpu/run.sh                        # builds what is missing, then all parts, best first
    python -m benchmarks.gpu --only check        # or speed, speed-1, speed-2, or parts by name, comma-separated
    python -m benchmarks.gpu --dry               # tiny sizes, also without a GPU: do the scripts run?

Each part is a script, runs in a process of its own and has a time limit: one that hangs or crashes costs only itself.
It writes its record as its figures come; ``report.md`` has all of them. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.record import write_record
from benchmarks.gpu.program import run_program
from benchmarks.gpu.report import write_report
from benchmarks.gpu.script import NO_GPU, argument_parser, folder_of, scrubbed

PACKAGE = "benchmarks.gpu."


@dataclass(frozen=True, kw_only=True)
class Part:
    """One script."""

    module: str
    """In this package."""
    limit_s: float
    """Longest time; what it had measured until then is kept."""
    group: str
    arguments: tuple[str, ...] = ()


PARTS: dict[str, Part] = {
    "machine": Part(module="check.machine", limit_s=30, group="check"),
    "steps": Part(module="check.steps", limit_s=150, group="check"),
    "exactness": Part(module="check.exactness", limit_s=110, group="check", arguments=("--seconds", "60")),
    "mailbox": Part(module="check.mailbox", limit_s=40, group="check"),
    "blocks": Part(module="check.blocks", limit_s=35, group="check"),
    "tests": Part(module="check.tests", limit_s=120, group="check", arguments=("--seconds", "110")),
    "sanitizer": Part(module="check.sanitizer", limit_s=105, group="check"),
    "limits": Part(module="speed.limits", limit_s=40, group="speed-1"),
    "llama": Part(module="speed.steps", limit_s=170, group="speed-1", arguments=("--shape", "llama")),
    "attention": Part(module="speed.attention", limit_s=60, group="speed-1"),
    "piggyback": Part(module="speed.piggyback", limit_s=120, group="speed-1"),
    "moves": Part(module="speed.moves", limit_s=60, group="speed-1"),
    "safepoints": Part(module="speed.safepoints", limit_s=60, group="speed-1"),
    "host": Part(module="speed.host", limit_s=150, group="speed-2"),
    "policies": Part(module="speed.policies", limit_s=190, group="speed-2"),
    "qwen": Part(module="speed.steps", limit_s=110, group="speed-2", arguments=("--shape", "qwen")),
    "transformers": Part(module="speed.beside_transformers", limit_s=100, group="speed-2"),
}
"""In this order. A group fits a command of ten minutes."""
_LEAST_S = 10.0
_DRY_PATIENCE = 4
"""A dry run may be on a busy machine."""
_KEPT_LINES = 60
_SAID = {0: "ok", 1: "failed: see its cases", NO_GPU: "there is no GPU"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, ``only`` as a list of parts; a bad one ends the program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default="check,speed", help=f"groups, or parts: {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=30.0, help="for everything (default: %(default)s)")
    parser.add_argument("--spent-s", type=float, default=0.0, help="of the minutes: seconds that a build took, say")
    args = parser.parse_args(arguments)
    wanted = args.only.split(",")
    groups = {group: [n for n, p in PARTS.items() if p.group.startswith(group)] for group in ("check", "speed")}
    groups |= {group: [n for n, p in PARTS.items() if p.group == group] for group in ("speed-1", "speed-2")}
    if unknown := [name for name in wanted if name not in PARTS and name not in groups]:
        parser.error(f"there is no part or group {', '.join(unknown)}; there are {', '.join([*groups, *PARTS])}")
    chosen = {part for name in wanted for part in groups.get(name, [name])}
    args.only = [name for name in PARTS if name in chosen]
    return args


def run_part(part: Part, out: Path, limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Run a part and return how it ended: status, seconds, and the end of what it said if that was not of itself."""
    if limit_s < _LEAST_S:
        return {"status": "not run: out of time", "seconds": 0.0}
    command = [sys.executable, "-m", PACKAGE + part.module, *part.arguments, "--out", str(out.absolute())]
    began_s = time.monotonic()
    status, lines = run_program([*command, *(["--dry"] if dry else [])], limit_s=limit_s, echo=True)
    said = f"cut after {limit_s:.0f} s" if status is None else _SAID.get(status, f"ended with status {status}")
    ended: dict[str, Any] = {"status": said, "seconds": time.monotonic() - began_s}
    if status not in (0, 1):
        ended["end_of_output"] = scrubbed("\n".join(lines[-_KEPT_LINES:])).splitlines()
    return ended


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    out = folder_of(args.out, dry=args.dry)
    ends_s = time.monotonic() + 60 * args.minutes - args.spent_s
    summary = out / "gpu.json"  # also of parts that another call ran
    earlier = json.loads(summary.read_text())["results"]["parts"] if summary.exists() else {}
    parts: dict[str, dict[str, Any]] = {}
    for name in args.only:
        (out / f"gpu_{name}.json").unlink(missing_ok=True)  # what is there afterwards is of this run
        limit_s = min(PARTS[name].limit_s * (_DRY_PATIENCE if args.dry else 1), ends_s - time.monotonic())
        print(f"\n## {name}\n", flush=True)
        parts[name] = run_part(PARTS[name], out, limit_s, dry=args.dry)
        config = {"only": args.only, "minutes": args.minutes, "dry": args.dry}
        write_record(summary, name="gpu", config=config, seed=0, results={"parts": earlier | parts})
        if parts[name]["status"] == _SAID[NO_GPU]:
            break
    write_report(out)
    print(f"\nreport: {out / 'report.md'}")
    bad = [f"{name} ({found['status']})" for name, found in parts.items() if found["status"] != "ok"]
    print(f"NOT OK: {', '.join(bad)}" if bad else f"{len(parts)} parts ok")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

"""Renew the stale records that were made on a machine like this one.

    python -m benchmarks.renew --list
    python -m benchmarks.renew

A record in benchmarks/results is stale if its field ``stale`` says why. Each is measured again by the command that made
it, on the same kind of CPU: a figure of another one would not be comparable with those beside it. The new record has no
such field. The pages that quote it (README.md, docs/) are edited by hand: the program names them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import ROOT, environment, read_record, stale_reason
from benchmarks.common.terminal import argument_parser

RESULTS = ROOT / "benchmarks" / "results"
COMMANDS = {
    "coserve.json": ("benchmarks.coserve", "--plot", "benchmarks/results/coserve.png"),
    "coserve_memory.json": (
        "benchmarks.coserve", "--load", "memory", "--plot", "benchmarks/results/coserve_memory.png"
    ),
    "shared_cores.json": ("benchmarks.shared_cores",),
}  # fmt: skip
"""The command that made each record: module and arguments, without ``--record``."""


def kind_of(hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two records must share to be comparable."""
    return {name: hardware.get(name) for name in ("machine", "cpu", "cpu_features", "cores", "gpus")}


def stale_records(folder: Path) -> dict[Path, str]:
    """Return the stale records of a folder, and why they are stale."""
    reasons = {path: stale_reason(read_record(path)) for path in sorted(folder.glob("*.json"))}
    return {path: reason for path, reason in reasons.items() if reason}


def pages_with(path: Path) -> list[str]:
    """Return the pages that link to a record or to its plot."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages if f"results/{path.stem}." in page.read_text()]


def renew(path: Path) -> bool:
    """Measure a record again, in its place; tell whether that worked."""
    if path.name not in COMMANDS:
        raise ValueError(f"no command is known for {path.name}; add it to COMMANDS in benchmarks/renew.py")
    module, *arguments = COMMANDS[path.name]
    command = [sys.executable, "-m", module, *arguments, "--record", str(path)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None, folder: Path = RESULTS) -> int:
    """Run the program; return 0 if all is as asked for, 1 if a benchmark failed, 2 if a record is of another kind."""
    parser = argument_parser(__doc__, list=(False, "measure nothing: list the stale records and why"))
    args = parser.parse_args(arguments)
    here, status = kind_of(environment()["hardware"]), 0
    for path, reason in stale_records(folder).items():
        kind = kind_of(read_record(path)["environment"]["hardware"])
        where = "this kind of machine" if kind == here else f"made on {_text(kind)}"
        if args.list:
            print(f"{path.name} ({where}): {reason}")
        elif kind != here:
            print(f"renew: {path.name} was {where}, this is {_text(here)}", file=sys.stderr)
            status = status or 2
        elif renew(path):
            print(f"renewed {path.name}; figures that quote it: {', '.join(pages_with(path)) or 'none'}", flush=True)
        else:
            print(f"renew: {path.name}: the benchmark failed, see above", file=sys.stderr)
            status = 1
    return status


def _text(kind: Mapping[str, Any]) -> str:
    features = " ".join(kind["cpu_features"] or ())
    return f"{kind['cores']} cores of {kind['cpu']} ({features}{', ' if kind['gpus'] else ''}{', '.join(kind['gpus'])})"


if __name__ == "__main__":
    sys.exit(main())

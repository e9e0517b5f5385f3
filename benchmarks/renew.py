"""Measure again what this kind of CPU can measure, those records first which a page quotes and which are old.

    python -m benchmarks.renew --list              # what would be measured, in which order, and how long it takes
    python -m benchmarks.renew                     # old rows; --all: every row
    python -m benchmarks.renew --minutes 30 peers  # as much as fits, of these records only
    python -m benchmarks.renew --peers ~/peers     # with other engines, where they are installed (benchmarks.peers)

Give the machine nothing else to do. Each new row replaces that of the same case and CPU kind, and the pages which quote
it are written anew at the end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pages
from benchmarks.common.record import cpu_kind, environment, read_rows
from benchmarks.common.sources import ROOT
from benchmarks.common.terminal import argument_parser
from benchmarks.measurements import MEASUREMENTS, RESULTS, Measurement, measurement_of, state_of
from benchmarks.records import quoted


def due(names: Sequence[str], kind: str, *, everything: bool) -> list[Measurement]:
    """Return what is to be measured on a CPU kind: quoted rows first, and of these short measurements first."""
    pages_of = quoted()
    paths = [RESULTS / f"{record}.json" for record in ("reproduction", "figures")]
    simulated = [measurement_of(p.stem, row["case"]) for p in paths if p.exists() for row in read_rows(p)]
    found = []
    for measurement in (*MEASUREMENTS, *simulated):
        if kind not in measurement.kinds or (names and measurement.record not in names):
            continue
        path = RESULTS / f"{measurement.record}.json"
        rows = [row for row in (read_rows(path) if path.exists() else []) if row["case"] == measurement.case]
        if not measurement.is_simulated:
            rows = [row for row in rows if cpu_kind(row["environment"]["hardware"]) == kind]
        if everything or all(state_of(measurement.record, row).is_old for row in rows):
            found.append(measurement)

    def is_quoted(one: Measurement) -> bool:
        kinds = {quoted_kind for record, case, quoted_kind in pages_of if (record, case) == (one.record, one.case)}
        return bool(kinds) if one.is_simulated else kind in kinds

    return sorted(found, key=lambda each: (not is_quoted(each), each.minutes))


def renew(measurement: Measurement, peers: Path | None) -> bool:
    """Run the command of a measurement; tell whether that worked."""
    record = RESULTS / f"{measurement.record}.json"
    arguments = [argument.replace("PEERS", str(peers)) for argument in measurement.command]
    command = [sys.executable, "-m", *arguments, "--record", str(record)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 0 if all was measured that was due, 1 if a benchmark failed."""
    parser = argument_parser(
        __doc__, list=(False, "measure nothing: say what is due"), all=(False, "every row, not only old ones"),
        minutes=(0.0, "begin nothing that would end later than after so many minutes; 0: no bound"),
    )  # fmt: skip
    parser.add_argument("--peers", type=Path, help="folder with the other engines")
    parser.add_argument("names", nargs="*", help="records; none: all")
    args = parser.parse_args(arguments)
    kind = cpu_kind(environment()["hardware"])
    began_s, status, num_renewed = time.monotonic(), 0, 0
    for measurement in due(args.names, kind, everything=args.all):
        name = f"{measurement.record} {measurement.case}".strip()
        passed = (time.monotonic() - began_s) / 60
        if measurement.needs and args.peers is None:
            print(f"{name}: left out: it needs {measurement.needs} (--peers)")
        elif args.list:
            print(f"{name}: {measurement.minutes:g} min: python -m {' '.join(measurement.command)}")
        elif args.minutes and passed + measurement.minutes > args.minutes:
            print(f"{name}: left out: {measurement.minutes:g} min, of which {args.minutes - passed:.0f} are left")
        elif renew(measurement, args.peers):
            num_renewed += 1
            print(f"renewed {name} after {(time.monotonic() - began_s) / 60:.1f} min", flush=True)
        else:
            print(f"renew: {name}: the benchmark failed, see above", file=sys.stderr)
            status = 1
    return (pages.main([]) or status) if num_renewed else status


if __name__ == "__main__":
    sys.exit(main())

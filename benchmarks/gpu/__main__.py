"""Everything that has a goal on a GPU, part by part, best first, within minutes.

    benchmarks/gpu/run.sh                             # builds what is missing, then all parts
    benchmarks/gpu/run.sh --only decode,prefill --minutes 4
    python -m benchmarks.gpu --dry                    # tiny sizes, also without a GPU: does it run?

Tables have what was measured, the floor (what the hardware allows, measured in the same run; a ceiling where more is
better), their ratio and the goal. A part that takes too long is cut: what it had measured stays, the rest is "not
measured". The record is written after each part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import ROOT, write_record
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.supervise import Supervisor
from benchmarks.gpu.table import markdown

_GRACE_S = 15.0
_END_S = 20.0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line; a bad one ends the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {name:13} {part.about}" for name, part in PARTS.items()),
    )
    parser.add_argument("--only", help="parts, comma-separated (default: all)")
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything (default: %(default)s)")
    parser.add_argument("--spent-s", type=float, default=0.0, help="of the minutes: seconds that a build took, say")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on whatever device there is")
    parser.add_argument("--record", type=Path, help="default: gpu.json in $OUT, or in benchmarks/results/gpu")
    args = parser.parse_args(arguments)
    args.only = list(PARTS) if args.only is None else args.only.split(",")
    if unknown := [name for name in args.only if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.minutes * 60 - args.spent_s <= _END_S:
        parser.error(f"--minutes must be more than {(_END_S + args.spent_s) / 60:.2g}, got {args.minutes:g}")
    if args.record is None:
        whole = "gpu" if args.only == list(PARTS) else "gpu_" + "_".join(args.only)
        folder = os.environ.get("OUT") or (ROOT / ".cache" / "gpu" if args.dry else ROOT / "benchmarks/results/gpu")
        args.record = Path(folder) / f"{whole}.json"
    return args


def device() -> dict[str, Any]:
    """Return what nvidia-smi says of the GPUs; empty without one."""
    fields = "name,memory.total,driver_version,clocks.max.sm,clocks.max.mem,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ") if done.returncode == 0 else []
    return dict(zip(fields.split(","), values, strict=False))


def main(arguments: Sequence[str] | None = None) -> int:
    began_s = time.time()
    args = parse_arguments(arguments)
    began_s -= args.spent_s
    if args.dry:
        print("dry run: tiny sizes, no figure means anything")
    nvidia = device()

    def after(name: str) -> None:
        outcome = supervisor.outcomes[name]
        status = outcome.status.splitlines()[-1]
        print(f"\n## {name}: {PARTS[name].about} ({outcome.seconds:.0f} of {outcome.limit_s:.0f} s, {status})\n")
        print(markdown(outcome.rows), flush=True)
        results = {part: one.as_record() for part, one in supervisor.outcomes.items()}
        config = {"parts": args.only, "minutes": args.minutes, "dry": args.dry, "nvidia_smi": nvidia}
        write_record(args.record, name="gpu", config=config, seed=0, results=results)

    supervisor = Supervisor(
        args.only, ends_at_s=began_s + 60 * args.minutes - _END_S, dry=args.dry, grace_s=_GRACE_S, on_end=after
    )
    supervisor.run()
    left_out = [name for name, outcome in supervisor.outcomes.items() if not outcome.seconds]
    failed = [name for name, outcome in supervisor.outcomes.items() if outcome.failed]
    print(f"\nrecord: {args.record}, after {time.time() - began_s:.0f} s")
    for text, names in (("not measured", left_out), ("FAILED, see above", failed)):
        if names:
            print(f"{text}: {', '.join(names)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Everything about this project that only a GPU can tell: first what is broken, then how fast the rest is.

    benchmarks/gpu/run.sh                        # builds what is missing, then all parts, best first
    python -m benchmarks.gpu --only check        # or speed, speed-1, speed-2, or parts by name, comma-separated
    python -m benchmarks.gpu --dry               # tiny sizes, also without a GPU: do the scripts run?
    python -m benchmarks.gpu --here speed_moves:moves    # one part in this process, without a time limit

Each part is a function, runs in a process of its own and has a time limit: one that hangs or crashes costs only itself.
It writes its record as its figures come; ``report.md`` has all of them (``--only report`` writes it anew). The exit
status is 1 if a part failed, and of one part 3 if there is no GPU and this is no dry run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import ROOT, read_row, write_record
from benchmarks.common.terminal import argument_parser, table
from benchmarks.gpu.script import Script, run_program, scrubbed, short

NO_GPU = 3
FORECAST = ROOT / "benchmarks" / "results" / "gpu_forecast.json"
RUNNER = ("benchmarks.gpu", "--here")
PARTS: dict[str, tuple[str, float, str]] = {
    "machine": ("check", 30, "check_machine"),
    "steps": ("check", 150, "check_steps"),
    "exactness": ("check", 110, "check_tests"),
    "marked_tests": ("check", 170, "check_tests"),
    "sanitizer": ("check", 130, "check_tests"),
    "limits": ("speed-1", 40, "speed_moves"),
    "llama": ("speed-1", 170, "speed_steps"),
    "attention": ("speed-1", 60, "speed_attention"),
    "piggyback": ("speed-1", 120, "speed_piggyback"),
    "moves": ("speed-1", 60, "speed_moves"),
    "safepoints": ("speed-1", 120, "speed_policies"),
    "host": ("speed-2", 150, "speed_host"),
    "policies": ("speed-2", 190, "speed_policies"),
    "qwen": ("speed-2", 110, "speed_steps"),
    "transformers": ("speed-2", 100, "speed_steps"),
}
"""Part, which is a function of that name -> group, which fits a command of ten minutes; longest seconds; module."""
GROUPS = ("check", "speed", "speed-1", "speed-2", "report")
_LEAST_S = 10.0
_DRY_PATIENCE = 4
"""A dry run may be on a busy machine."""
_SAID = {None: "cut", 0: "ok", 1: "failed: see its cases", NO_GPU: "there is no GPU"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, ``only`` as a list of parts; a bad one ends the program."""
    parser = argument_parser(
        __doc__, minutes=(30.0, "for everything"), spent_s=(0.0, "of the minutes: seconds that a build took, say"),
        dry=(False, "tiny sizes, on the CPU where there is no GPU"),
        only=("check,speed", f"groups, or parts: {', '.join(PARTS)}"),
    )  # fmt: skip
    parser.add_argument("--here", metavar="MODULE:PART", help="run a module's function in this process")
    parser.add_argument("--out", type=Path, help="folder of the records (default: $OUT, or benchmarks/results/gpu)")
    args = parser.parse_args(arguments)
    default = ROOT / ".cache" / "gpu-dry" if args.dry else ROOT / "benchmarks" / "results" / "gpu"
    args.out = args.out or Path(os.environ.get("OUT") or default)
    wanted = set(args.only.split(","))
    if unknown := wanted - {*PARTS, *GROUPS}:
        parser.error(f"there is no part or group {', '.join(unknown)}; there are {', '.join([*GROUPS, *PARTS])}")
    args.only = [name for name, (group, *_) in PARTS.items() if {name, group, group.split("-")[0]} & wanted]
    return args


def run_apart(name: str, args: argparse.Namespace, ends_s: float) -> dict[str, Any]:
    """Run a part in a process of its own; return its status, its seconds, and the end of what it said if it crashed."""
    (args.out / f"gpu_{name}.json").unlink(missing_ok=True)  # what is there afterwards is of this run
    _, limit_s, module = PARTS[name]
    limit_s = min(limit_s * (_DRY_PATIENCE if args.dry else 1), ends_s - time.monotonic())
    print(f"\n## {name}\n", flush=True)
    if limit_s < _LEAST_S:
        return {"status": "not run: out of time", "seconds": 0.0}
    command = [sys.executable, "-m", *RUNNER, f"{module}:{name}", "--out", args.out.absolute(), *["--dry"] * args.dry]
    began_s = time.monotonic()
    status, lines = run_program(command, limit_s=limit_s, echo=True)
    part = {"status": _SAID.get(status, f"ended with status {status}"), "seconds": time.monotonic() - began_s}
    if status not in (0, 1):
        part["end_of_output"] = scrubbed("\n".join(lines[-60:])).splitlines()
    return part


def run_here(path: str, *, dry: bool, out: Path) -> int:
    """Run the part ``MODULE:PART`` in this process, and return the exit status."""
    module, _, name = path.partition(":")
    script = Script(name, dry=dry, out=out)
    lacks_gpu = not script.on_gpu and not dry
    if lacks_gpu and name != "machine":
        print("there is no GPU that torch can use; --dry runs tiny sizes on the CPU", file=sys.stderr)
        return NO_GPU
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(script)
    return NO_GPU if lacks_gpu else int(any(case.outcome == "FAIL" for case in script.cases))


def write_report(out: Path) -> None:
    """Write ``report.md`` from the records in a folder, the parts of the last run first."""
    records = {path.stem: read_row(path) for path in sorted(out.glob("gpu_*.json"))}
    lines = ["# What this GPU says", ""]
    if (summary := out / "gpu.json").exists():
        parts = read_row(summary)["results"]["parts"]
        rows = [[name, part["status"], f"{part['seconds']:.0f}"] for name, part in parts.items()]
        lines += [table([["part", "status", "seconds"], *rows]), ""]
        for name, part in parts.items():
            if end := part.get("end_of_output"):
                lines += [f"The end of what {name} said:", "", "```", *end, "```", ""]
    for name, record in records.items():
        cases, environment = record["results"]["cases"], record["environment"]
        commit = environment["git"]["commit"] or "no commit"
        gpus = ", ".join(environment["hardware"]["gpus"]) or "no GPU"
        dry = ", DRY: no figure means anything" if record["config"]["dry"] else ""
        lines += [f"## {name} ({record['time']}, {gpus}, {commit[:12]}{dry})", "", markdown(cases), ""]
        for case in cases:
            if case["outcome"] == "FAIL":
                lines += [f"### FAIL: {case['case']}", "", "```", case["note"], "```", ""]
    lines += beside_forecast(records.values())
    (out / "report.md").write_text("\n".join(lines) + "\n")


def markdown(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of cases as records hold them."""
    lines = [["", "case", "measured", "limit", "ratio", "goal", "met", "note"]]
    for case in cases:
        values = ["" if case[key] is None else f"{short(case[key])} {case['unit']}" for key in ("measured", "limit")]
        met, note = {None: "", True: "yes", False: "NO"}[case["met"]], case["note"].partition("\n")[0]
        row = [case["outcome"], case["case"], *values, short(case["ratio"]), case["goal"], met, note.replace("|", "/")]
        lines.append(row)
    return table(lines)


def beside_forecast(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a table of the steps that both a record and ``benchmarks.gpu_forecast`` have."""
    forecast = read_row(FORECAST)["results"]
    rows = [["step", "measured ms", "expected ms", "ratio", "floor ms", "on"]]
    for record in records:
        gpus = " ".join(record["environment"]["hardware"]["gpus"])
        for case in record["results"]["cases"]:
            details = case["details"]
            entries = forecast.get(details.get("model"), {}).get("steps", ())
            for entry in entries if case["measured"] is not None else ():
                if {"seats": 0, **entry["step"]} != {"seats": 0, **details["step"]}:
                    continue
                for device, times in entry["devices"].items():
                    if device.split("-")[0] in gpus:
                        measured_ms, expected_ms = details["step_ms"], 1e3 * times["expected_s"]
                        figures = (measured_ms, expected_ms, measured_ms / expected_ms, 1e3 * times["floor_s"])
                        rows.append([case["case"], *map(short, figures), device])
    return ["## Beside the forecast", "", table(rows), ""] if len(rows) > 1 else []


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.here is not None:
        return run_here(args.here, dry=args.dry, out=args.out)
    ends_s = time.monotonic() + 60 * args.minutes - args.spent_s
    summary = args.out / "gpu.json"  # also of parts that another call ran
    earlier = read_row(summary)["results"]["parts"] if summary.exists() else {}
    parts: dict[str, dict[str, Any]] = {}
    for name in args.only:
        parts[name] = run_apart(name, args, ends_s)
        config = {"only": args.only, "minutes": args.minutes, "dry": args.dry}
        write_record(summary, name="gpu", config=config, seed=0, results={"parts": earlier | parts})
        if parts[name]["status"] == _SAID[NO_GPU]:
            break
    write_report(args.out)
    print(f"\nreport: {args.out / 'report.md'}")
    bad = [f"{name} ({found['status']})" for name, found in parts.items() if found["status"] != "ok"]
    print(f"NOT OK: {', '.join(bad)}" if bad else f"{len(parts)} parts ok")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

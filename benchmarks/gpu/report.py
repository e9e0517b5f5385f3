"""One page of all records in a folder: ``python -m benchmarks.gpu.report --out FOLDER`` writes ``report.md`` there.

Where ``benchmarks/results/gpu_forecast.json`` exists, measured steps stand beside what it predicts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import ROOT
from benchmarks.gpu.script import argument_parser, folder_of, markdown, short, table

FORECAST = ROOT / "benchmarks" / "results" / "gpu_forecast.json"


def write_report(out: Path) -> None:
    """Write ``report.md`` from the records in a folder, the parts of the last run first."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("gpu_*.json"))}
    lines = ["# What this GPU says", ""]
    if (summary := out / "gpu.json").exists():
        parts = json.loads(summary.read_text())["results"]["parts"]
        rows = [[name, part["status"], f"{part['seconds']:.0f}"] for name, part in parts.items()]
        lines += [table([["part", "status", "seconds"], *rows]), ""]
        for name, part in parts.items():
            if end := part.get("end_of_output"):
                lines += [f"The end of what {name} said:", "", "```", *end, "```", ""]
    for name, record in records.items():
        cases = record["results"]["cases"]
        commit = record["environment"]["git"]["commit"] or f"code {record['environment']['code']}"
        gpus = ", ".join(record["environment"]["hardware"]["gpus"]) or "no GPU"
        dry = ", DRY: no figure means anything" if record["config"].get("dry") else ""
        lines += [f"## {name} ({record['time']}, {gpus}, {commit[:12]}{dry})", "", markdown(cases), ""]
        for case in cases:
            if case["outcome"] == "FAIL":
                lines += [f"### FAIL: {case['case']}", "", "```", case["note"], "```", ""]
    lines += beside_forecast(records)
    (out / "report.md").write_text("\n".join(lines) + "\n")


def beside_forecast(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the steps that both a record and the forecast have; nothing without a forecast."""
    forecast = json.loads(FORECAST.read_text())["results"] if FORECAST.exists() else {}
    rows = [["step", "measured ms", "expected ms", "ratio", "floor ms", "on"]]
    for record in records.values():
        gpus = " ".join(record["environment"]["hardware"]["gpus"])
        for case in record["results"]["cases"]:
            if case["measured"] is None or "step" not in case["details"]:
                continue
            measured_ms, found = case["details"]["step_ms"], case["details"]["step"]
            for device, times in predicted(forecast, case["details"]["model"], found).items():
                if device.split("-")[0] in gpus:
                    expected_ms, floor_ms = 1e3 * times["expected_s"], 1e3 * times["floor_s"]
                    ratio = measured_ms / expected_ms
                    rows.append([case["case"], *map(short, (measured_ms, expected_ms, ratio, floor_ms)), device])
    return ["## Beside the forecast", "", table(rows), ""] if len(rows) > 1 else []


def predicted(forecast: Mapping[str, Any], model: str, step: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return what a forecast (``benchmarks/gpu_forecast.py``) says of a step, by device; empty: nothing."""
    for entry in forecast.get(model, {}).get("steps", ()):
        if {"seats": 0, **entry["step"]} == {"seats": 0, **step}:
            devices: dict[str, dict[str, float]] = entry["devices"]
            return devices
    return {}


def main(arguments: Sequence[str] | None = None) -> int:
    args = argument_parser(__doc__).parse_args(arguments)
    out = folder_of(args.out, dry=args.dry)
    write_report(out)
    print((out / "report.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())

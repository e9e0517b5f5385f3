"""One page of all records in a folder: ``python -m benchmarks.gpu.report --out FOLDER`` writes ``report.md`` there.

Where ``benchmarks/results/gpu_forecast.json`` exists, measured steps stand beside what it predicts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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


def beside_forecast(records: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table of the steps that both a record and the forecast have; nothing without a forecast."""
    if not FORECAST.exists():
        return []
    forecast = json.loads(FORECAST.read_text())
    rows = [["step", "measured ms", "predicted ms", "ratio"]]
    for record in records.values():
        for case in record["results"]["cases"]:
            wanted = case["details"].get("forecast")
            if wanted is None or case["measured"] is None:
                continue
            predicted_ms = predicted(forecast, wanted)
            measured_ms = wanted.get("ms", case["measured"])
            if predicted_ms is not None:
                row = [case["case"], short(measured_ms), short(predicted_ms), short(measured_ms / predicted_ms)]
                rows.append(row)
    return ["## Beside the forecast", "", table(rows), ""] if len(rows) > 1 else []


def predicted(forecast: dict[str, Any], wanted: dict[str, Any]) -> float | None:
    """Return the milliseconds that a forecast's entry for a step predicts; None: it has none.

    Args:
        forecast: Its record: ``results.steps`` is a list of objects with ``predicted_ms``.
        wanted: What an entry must have: ``shape`` and ``kind``, with ``batch`` and ``context`` of a decode step, or
            ``tokens`` of a prompt.
    """
    keys = ("shape", "kind", "batch", "context", "tokens")
    for step in forecast["results"].get("steps", ()):
        if wanted.get("chunk") is None and all(step.get(key) == wanted.get(key) for key in keys):
            return float(step["predicted_ms"])
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    args = argument_parser(__doc__).parse_args(arguments)
    out = folder_of(args.out, dry=args.dry)
    write_report(out)
    print((out / "report.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())

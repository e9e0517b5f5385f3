"""Writes one page of all records in a folder, steps beside the forecast: ``python -m benchmarks.gpu --only report``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.record import ROOT, read_row
from benchmarks.common.terminal import table
from benchmarks.gpu.script import short

FORECAST = ROOT / "benchmarks" / "results" / "gpu_forecast.json"


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

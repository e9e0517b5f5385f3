"""Benchmark records: JSON files that say what was measured, on what, with which code.

A record has rows. A row is one case of a benchmark, measured on one kind of CPU (``cpu_kind``), with its environment:
commit, digests of the sources that ran (``benchmarks/common/sources.py``), versions and hardware.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.sources import ROOT, measured_sources

PACKAGES = (
    "omniserve", "torch", "triton", "xformers", "transformers", "tokenizers", "numpy", "fastapi", "uvicorn", "httpx",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Return commit, dirty flag, digests of the code that ran, package versions and hardware of this run."""
    installed = {distribution.name.lower() for distribution in importlib.metadata.distributions()}
    return {
        "git": _git(), "sources": measured_sources(), "python": platform.python_version(), "hardware": _hardware(),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES if package in installed},
    }  # fmt: skip


def write_record(
    path: Path, *, name: str, case: str = "", config: Mapping[str, Any], seed: int, results: Mapping[str, Any],
    raw: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Add a row to the record at ``path``: one case, measured now, on this machine, with this code.

    The row replaces the one of the same case and CPU kind that is there, or if ``config`` says ``simulated``, that of
    any kind. Dataclasses become objects, and of absolute paths in ``config`` only what means something on other
    machines is kept (see ``portable``). A hash of ``config`` and ``seed`` identifies the workload.

    Args:
        path: The record, ``NAME.json``.
        name: The benchmark.
        case: What was measured, if the benchmark has several cases.
        config: All settings of the run.
        seed: Seed of the workload.
        results: The figures.
        raw: Times of single requests or samples, from which the figures were computed. They go to ``NAME.raw.json``
            beside the record, which git ignores.
    """
    config = portable(config)
    config_text = json.dumps({"config": config, "seed": seed}, sort_keys=True)
    row = {
        "case": case,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "config": config,
        "seed": seed,
        "workload_hash": hashlib.sha256(config_text.encode()).hexdigest()[:16],
        "results": dict(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    _add(path, name, row)
    if raw is not None:
        _add(path.with_name(f"{path.stem}.raw.json"), name, row | {"results": dict(raw)})


def _add(path: Path, name: str, row: Mapping[str, Any]) -> None:
    rows = read_rows(path) if path.exists() else []
    kept = [other for other in rows if other["case"] != row["case"] or not _is_replaced(other, row)]
    write_rows(path, name, [*kept, row])


def _is_replaced(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    kinds = {cpu_kind(row["environment"]["hardware"]) for row in (old, new)}
    return len(kinds) == 1 or bool(new["config"].get("simulated"))


def write_rows(path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a record of these rows; rows of one run share their environment in the file.

    A record that is there stays whole, whatever ends this program.
    """
    environments: dict[str, Any] = {}
    plain_rows = []
    for row in sorted(rows, key=lambda row: (row["case"], cpu_kind(row["environment"]["hardware"]))):
        text = json.dumps(row["environment"], sort_keys=True, default=_plain)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        environments[key] = row["environment"]
        plain_rows.append({**row, "environment": key})
    record = {"benchmark": name, "environments": environments, "rows": plain_rows}
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(record, indent=1, default=_plain) + "\n")
    unfinished.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a record, each with its environment.

    Raises:
        OSError, ValueError: There is none.
    """
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or "rows" not in record:
        raise ValueError(f"{path} is not a record of a benchmark")
    return [{**row, "environment": record["environments"][row["environment"]]} for row in record["rows"]]


def read_row(path: Path, case: str = "", kind: str | None = None) -> dict[str, Any]:
    """Return the row of a case: of a CPU kind, or the newest of all kinds.

    Raises:
        OSError, ValueError: There is no such record, or no such row in it.
    """
    rows = [row for row in read_rows(path) if row["case"] == case]
    rows = [row for row in rows if kind is None or cpu_kind(row["environment"]["hardware"]) == kind]
    if not rows:
        of_kind = "" if kind is None else f" of a CPU with {kind}"
        raise ValueError(f"{path} has no row{of_kind} of the case {case!r}")
    return max(rows, key=lambda row: str(row["time"]))


def cpu_kind(hardware: Mapping[str, Any]) -> str:
    """Return what figures of the CPU depend on most: the widest instructions of its products."""
    features = hardware.get("cpu_features") or ()
    if "amx_bf16" in features:
        return "AMX"
    if "avx512f" in features:
        return "AVX-512"
    return "AVX2" if "avx2" in features else str(hardware.get("machine", "unknown"))


def portable(value: Any) -> Any:
    """Return a setting as JSON knows it; a path in the project from its root, any other absolute path as its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [portable(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    path = Path(text)
    if not path.is_absolute():
        return text
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def _git() -> dict[str, Any]:
    def run(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Records of earlier runs do not change what is measured.
    status = run("status", "--porcelain", "--", ".", ":!benchmarks/results")
    # None, not False, outside of a repository: nothing is known about the code then.
    return {"commit": run("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _hardware() -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(cpu_info) if line.startswith("model name")]
    flags = next((line for line in _lines(cpu_info) if line.startswith("flags")), "")
    return {
        "machine": platform.machine(),
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_features": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags.split()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

"""Benchmark records: JSON files that say what was measured, on what, with which code."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "omniserve", "torch", "triton", "xformers", "transformers", "tokenizers", "numpy", "fastapi", "uvicorn", "httpx",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Return commit, dirty flag, a hash of the code, package versions and hardware of this run."""
    installed = {distribution.name.lower() for distribution in importlib.metadata.distributions()}
    return {
        "git": _git(), "code": _code_hash(), "python": platform.python_version(), "hardware": _hardware(),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES if package in installed},
    }  # fmt: skip


def write_record(path: Path, *, name: str, config: Mapping[str, Any], seed: int, results: Mapping[str, Any]) -> None:
    """Write one record; dataclasses become objects, and of absolute paths in ``config`` only what means something on
    other machines is kept (see ``portable``). A hash of ``config`` and ``seed`` identifies the workload.
    """
    config = portable(config)
    config_text = json.dumps({"config": config, "seed": seed}, sort_keys=True)
    record = {
        "benchmark": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "config": config,
        "seed": seed,
        "workload_hash": hashlib.sha256(config_text.encode()).hexdigest()[:16],
        "results": dict(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, default=_plain) + "\n"
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)  # a record that is there stays whole, whatever ends this program


def read_record(path: Path) -> dict[str, Any]:
    """Return a record.

    Raises:
        OSError, ValueError: There is none.
    """
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or "environment" not in record:
        raise ValueError(f"{path} is not a record of a benchmark")
    return record


def stale_reason(record: Mapping[str, Any]) -> str:
    """Return why a record's figures no longer hold, from its field ``stale``; empty: they do as far as is known.

    The field is added by hand when a defect is found that a record was made with; ``benchmarks/renew.py`` reads it.
    """
    return str(record.get("stale", ""))


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


def _code_hash() -> str:
    """Return a hash of the project's sources: it tells records apart where a tree was copied without its repository."""
    kinds = {".py", ".cpp", ".h", ".inl", ".sh", ".toml"}
    folders = (ROOT / "omniserve", ROOT / "benchmarks", ROOT / "tests")
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in kinds)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


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

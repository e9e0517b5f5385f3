"""The CPU attention benchmark runs from end to end, and says what is wrong with what it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.bandwidth import available_bytes
from benchmarks.common.record import read_row
from benchmarks.cpu_attention import parse_row

ROOT = Path(__file__).resolve().parents[2]


def test_limits_and_rows_are_measured_and_recorded(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    # In a process of its own, because it pins its threads.
    command = [sys.executable, "-m", "benchmarks.cpu_attention", "--tiny", "--record", str(path)]
    env = os.environ | {"GOMP_SPINCOUNT": "10000"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = read_row(path)["results"]
    assert any(name.startswith("sequential") for name in results["limits"])
    (row,) = results["rows"].values()
    assert set(row["candidates"]) >= {"ours", "SDPA", "SDPA grouped"}
    assert all(0 < candidate["share"] and candidate["error"] < 0.05 for candidate in row["candidates"].values())


def test_a_row_is_parsed() -> None:
    row = parse_row("Yi/3x5..9/1 thread", 8, seed=0)
    work = row.work
    assert (row.threads, work.num_heads, work.kv_heads, work.head_size) == (1, 56, 8, 128)
    assert len(work.context_lens) == 3 and all(5 <= length <= 9 for length in work.context_lens)
    assert work.num_bytes == sum(work.context_lens) * 8 * 2 * 128 * 2


@pytest.mark.parametrize("name", ["L8", "L9/1x1", "L8/1x1/head", "L8/ax1"])
def test_a_row_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"a row's name is .*got"):
        parse_row(name, 1, seed=0)


def test_memory_that_can_be_had_is_the_kernels_figure_within_the_groups_limit(tmp_path: Path) -> None:
    lines = ["MemTotal: 900 kB", "MemAvailable: 500 kB"]
    assert available_bytes(lines, group=tmp_path) == 500 * 1024, "no control group"
    for name, text in (("memory.max", "max\n"), ("memory.current", "1000\n")):
        (tmp_path / name).write_text(text)
    assert available_bytes(lines, group=tmp_path) == 500 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    assert available_bytes(lines, group=tmp_path) == 2000
    with pytest.raises(RuntimeError, match="no MemAvailable"):
        available_bytes(lines[:1], group=tmp_path)

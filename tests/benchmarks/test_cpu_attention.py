"""The CPU attention benchmark runs from end to end, and says what is wrong with what it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attention import report
from benchmarks.attention.decode_rows import parse_row
from benchmarks.common.bandwidth import available_bytes
from benchmarks.common.record import read_row

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a process of its own, because it pins its threads."""
    command = [sys.executable, "-m", "benchmarks.cpu_attention", "--tiny", *arguments]
    env = os.environ | {"GOMP_SPINCOUNT": "10000"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_all_sections_run_and_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    done = run_benchmark("--record", str(path))
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = read_row(path)["results"]
    for section in ("limits", "rows", "head_sizes", "small", "busy", "prefill", "engine"):
        assert results[section], section
    (row,) = results["rows"].values()
    assert set(row["candidates"]) >= {"ours", "SDPA", "SDPA grouped"}
    assert all(0 < candidate["share"] and candidate["error"] < 0.05 for candidate in row["candidates"].values())
    for team in results["busy"].values():
        assert all(side["gb_per_s"] > 0 for side in team["attention"].values())
        assert all(side["steps_per_s"] > 0 for side in team["dense"].values())
    for engine in results["engine"].values():
        assert engine["medians"]["gb_per_s"] > 0 and engine["medians"]["steps_per_s"] > 0


def test_a_row_is_parsed() -> None:
    row = parse_row("Yi/3x5..9/H64/1 thread", 8, seed=0)
    work = row.work
    assert (row.threads, work.num_heads, work.kv_heads, work.head_size) == (1, 56, 8, 64)
    assert len(work.context_lens) == 3 and all(5 <= length <= 9 for length in work.context_lens)
    assert work.num_bytes == sum(work.context_lens) * 8 * 2 * 64 * 2


@pytest.mark.parametrize("name", ["L8", "L9/1x1", "L8/1x1/head", "L8/ax1"])
def test_a_row_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"a row's name is .*got"):
        parse_row(name, 1, seed=0)


ROWS = {
    "L8/1x1": {
        "candidates": {
            "ours": {"share": 0.9, "samples": [{"gb_per_s": 9.0, "limit_before": 10.0, "limit_after": 10.0}]},
            "SDPA": {"share": 0.5, "samples": [{"gb_per_s": 5.0, "limit_before": 9.0, "limit_after": 11.0}]},
        }
    },
    "L7/1x1": {
        "candidates": {
            "ours": {"share": 0.8, "samples": [{"gb_per_s": 8.0, "limit_before": 10.0, "limit_after": 10.0}]}
        }
    },
}


def test_shares_are_plotted(tmp_path: Path) -> None:
    report.plot_shares(ROWS, tmp_path / "plots" / "shares.png")
    assert (tmp_path / "plots" / "shares.png").read_bytes().startswith(b"\x89PNG")


def test_plotting_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"omniserve\[bench\]"):
        report.plot_shares(ROWS, tmp_path / "shares.png")
    assert not list(tmp_path.iterdir())


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

"""Tuning of the attention kernel: what is best computes the same, and is not slower than the default was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import tune_attention
from benchmarks.gpu.script import Script, argument_parser
from benchmarks.gpu.tune_attention import DRY_LOADS, LLAMA, SETTINGS, Case, Load, tune, tune_loads
from omniserve.ops.kernels.attention_launch import NARROW, Tuning

CPU = torch.device("cpu")


def test_default_and_best_of_each_load_are_measured(tmp_path: Path) -> None:
    script = Script("tuning", argument_parser("").parse_args(["--dry", "--out", str(tmp_path)]))
    tune_loads(script, DRY_LOADS, seconds=100)
    tune_loads(script, DRY_LOADS, seconds=-1)
    best, late = script.cases
    assert best.outcome == "PASS" and best.measured and best.limit and best.details["default_us"] > 0, best
    assert best.details["tuning"]["tiles"][0]["block_m"] in SETTINGS["rows"][0]
    assert (late.outcome, late.note) == ("SKIP", "out of time")


def test_the_fastest_is_found_setting_after_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(case: Case, tuning: Tuning, repeats: int) -> float:
        if tuning is NARROW:
            return 99.0
        (tile,) = tuning.tiles
        return (
            1
            + (tile.block_m != 32)
            + (tile.num_warps != 2)
            + (tile.num_stages != 3)
            + (tuning.programs_per_multiprocessor != 3)
        )

    monkeypatch.setattr(Case, "seconds", seconds)
    monkeypatch.setattr(Case, "attend", lambda case, tuning: torch.zeros(1))
    default_s, best_s, best = tune(Case(DRY_LOADS[0], CPU), ends_s=float("inf"), repeats=1, few=False)
    (tile,) = best.tiles
    assert (default_s, best_s) == (99.0, 1.0)
    assert (tile.block_m, tile.num_warps, tile.num_stages, best.programs_per_multiprocessor) == (32, 2, 3, 3)


def test_a_variant_that_computes_something_else_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "seconds", lambda case, tuning, repeats: 1.0)
    monkeypatch.setattr(Case, "attend", lambda case, tuning: torch.full((1,), float(tuning is NARROW)))
    with pytest.raises(AssertionError):
        tune(Case(DRY_LOADS[0], CPU), ends_s=float("inf"), repeats=1, few=True)


def test_bytes_and_operations_are_those_of_the_load() -> None:
    decode = Load(heads=LLAMA, requests=32, query=1, context=1024)
    assert decode.kv_bytes == 32 * 1024 * 4096 and decode.flops == 4 * 32 * 32 * 128 * 1024
    prompt = Load(heads=LLAMA, requests=1, query=4, context=6)
    assert prompt.flops == 4 * 32 * 128 * (3 + 4 + 5 + 6)
    assert max(load.kv_bytes for load in tune_attention.LOADS) * tune_attention._CALLS < 20e9

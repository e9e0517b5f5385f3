"""The parts of benchmarks.simulator_validation that need no engine."""

from __future__ import annotations

import math

import pytest

from benchmarks.simulator_validation import Replay, parse_arguments, runs, table
from omniserve.latency import BatchFeatures
from omniserve.simulate.results import ClassResult
from tests.simulate.machines import Constant


def test_replayed_steps_take_what_was_recorded_and_then_what_the_model_says() -> None:
    replay = Replay([0.3, 0.1], Constant(0.05))
    assert [replay.step_s(BatchFeatures()) for _ in range(4)] == [0.3, 0.1, 0.05, 0.05]
    assert replay.terms(BatchFeatures()) == (0.05,)


def test_ratios_are_to_the_engine() -> None:
    def row(scale: float) -> dict[str, object]:
        figures = ClassResult(
            num_requests=1, num_rejected=0, num_finished=1, ttft_p50_s=0.1 * scale, ttft_p99_s=0.2 * scale,
            tpot_p50_s=0.01 * scale, tpot_p99_s=0.02 * scale, ttft_attainment=1.0, tpot_attainment=1.0,
            attainment=1.0, goodput=1.0, output_tokens_per_s=10.0 * scale, prompt_tokens_per_s=30.0 * scale,
        )  # fmt: skip
        return {"classes": {"LS": figures, "BE": figures}, "host_share": 0.5, "num_steps": 7}

    first, second = table("fcfs, device only", {"engine": row(1.0), "simulated": row(1.5)}).splitlines()
    assert first.split() == ["fcfs,", "device", "only", "engine", "100.0", "200.0", "10.0", "20.0", "40", "50%", "7"]
    assert second.split()[-5:] == ["1.50"] * 5
    assert not math.isnan(float(second.split()[1]))


def test_every_scheduler_meets_every_pool() -> None:
    found = list(runs(parse_arguments(["--schedulers", "fcfs", "omniserve"])))
    assert [(pools, scheduler) for pools, scheduler, _ in found] == [
        ("device only", "fcfs"), ("device only", "omniserve"), ("host tier", "fcfs"), ("host tier", "omniserve"),
    ]  # fmt: skip
    assert found[0][2].device_kv_bytes > found[2][2].device_kv_bytes
    with pytest.raises(SystemExit):
        parse_arguments(["--pools", "swimming"])

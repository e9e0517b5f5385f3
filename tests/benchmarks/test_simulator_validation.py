"""The parts of benchmarks.simulator_validation and simulator_served that need no engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.frontier import frontier_rows
from benchmarks.simulator_served import engine_config, load_of, simulate_row
from benchmarks.simulator_validation import (
    CALIBRATION,
    LOADS,
    Case,
    Replay,
    cases,
    figures_of,
    parse_arguments,
    ratios,
    summary,
)
from omniserve import EngineConfig
from omniserve.latency import BatchFeatures
from omniserve.simulate import Load
from omniserve.simulate.results import ClassResult
from tests.simulate.machines import Constant, constant


def run_of(scale: float = 1.0, **others: float | None) -> ClassResult:
    figures = ClassResult(
        num_requests=1, num_rejected=0, num_finished=1, ttft_p50_s=0.1 * scale, ttft_p99_s=0.2 * scale,
        tpot_p50_s=0.01 * scale, tpot_p99_s=0.02 * scale, ttft_attainment=1.0, tpot_attainment=1.0,
        attainment=1.0, goodput=1.0, output_tokens_per_s=10.0 * scale, prompt_tokens_per_s=30.0 * scale,
    )  # fmt: skip
    return dataclasses.replace(figures, **others)


def run(scale: float) -> dict[str, Any]:
    return {"figures": figures_of(run_of(scale), run_of(scale)), "host_share": 0.5}


def case(*engine: float, **twins: list[float]) -> Case:
    found = {name: [run(scale) for scale in scales] for name, scales in twins.items()}
    return Case("fcfs, steady", EngineConfig(), Load(), runs=[run(scale) for scale in engine], twins=found)


def test_replayed_steps_take_what_was_recorded_and_then_what_the_model_says() -> None:
    replay = Replay([0.3, 0.1], Constant(0.05))
    assert [replay.step_s(BatchFeatures()) for _ in range(4)] == [0.3, 0.1, 0.05, 0.05]
    assert replay.terms(BatchFeatures()) == (0.05,)


def test_ratios_are_of_medians_to_the_engines() -> None:
    found = ratios(case(1.0, 4.0, 2.0, calibrated=[3.0, 1.0, 3.0, 9.0]))
    assert found == {"calibrated": [pytest.approx(1.5)] * 5, "again": [pytest.approx(4.0)] * 5}
    assert "again" not in ratios(case(1.0, simulated=[1.0]))  # nobody knows what another run would be


def test_a_run_that_measured_nothing_is_refused() -> None:
    nothing = run_of(output_tokens_per_s=0.0, prompt_tokens_per_s=0.0, tpot_p99_s=None)
    with pytest.raises(ValueError, match="a run has no tpot_p99_s, be_tokens_per_s"):
        figures_of(nothing, nothing)


def test_a_summary_counts_what_is_within_the_goal_whichever_is_larger() -> None:
    found = [case(1.0, 1.0, calibrated=[1.04]), case(1.0, 1.2, calibrated=[1.0]), case(1.0, 1.0, calibrated=[1.25])]
    columns = summary(found)
    # Off by 4, 10 (the engine's median is 1.1) and 25 %; pairs of runs by 0, 20 and 0.
    assert (
        columns["calibrated"]
        == [{"median": pytest.approx(0.1), "largest": pytest.approx(0.25), "within_goal": pytest.approx(1 / 3)}] * 5
    )
    assert columns["again"][0] == {"median": 0.0, "largest": pytest.approx(0.2), "within_goal": pytest.approx(2 / 3)}


def test_every_scheduler_meets_every_load() -> None:
    found = list(cases(parse_arguments(["--schedulers", "fcfs", "omniserve", "--seconds", "4"])))
    assert [case.name for case in found] == [
        "fcfs, steady", "omniserve, steady", "fcfs, bursts", "omniserve, bursts", "fcfs, short memory",
        "omniserve, short memory",
    ]  # fmt: skip
    assert found[0].load == found[1].load and found[0].load.duration_s == 4.0
    assert found[0].config.device_kv_bytes > found[4].config.device_kv_bytes
    with pytest.raises(SystemExit):
        parse_arguments(["--loads", "swimming"])


def test_nothing_is_calibrated_on_what_it_is_compared_on() -> None:
    for mix in CALIBRATION:
        other = mix.load(8.0, 1)
        for held_out in LOADS.values():
            load = held_out.load(8.0, 1)
            assert load.backlog != other.backlog and held_out.rate != mix.rate
            assert not set(load.latency_sensitive) & set(other.latency_sensitive)
            shared = {dataclasses.astuple(request) for request in load.best_effort[:50]}
            assert len(shared & {dataclasses.astuple(request) for request in other.best_effort[:50]}) < 3


def test_a_recorded_row_is_simulated_with_its_flags_and_arrivals() -> None:
    sizes = {
        "ls_rate": 2.0, "ls_prompt": 40, "ls_output": 5, "seconds": 10.0, "be_requests": 6, "be_prompt": 64,
        "be_output": 9, "vocab_size": 100, "objectives": {"tight": [0.3, 0.06]},
    }  # fmt: skip
    load = load_of({"config": {"load": sizes}})
    rows = {row.name: row for row in frontier_rows(load.objectives, {"tight": 48})}
    row = rows["sarathi, 48 tokens a step, tight"]
    config = engine_config(["--device-kv-gib", "0.25"], row, (0.3, 0.06))
    assert (config.scheduler, config.max_num_batched_tokens, config.device_kv_bytes) == ("sarathi", 48, 1 << 28)
    assert config.class_named("LS").slo.tpot_s == 0.06
    figures = simulate_row(constant(0.01), row, load, ["--device-kv-gib", "0.25"], seed=0)
    # 6 x 64 prompt tokens in steps of 48, LS prompts between them, and 9 outputs: the pile is over in 0.2 s or so.
    assert 6 * 73 / 0.5 < figures["be_tokens_per_s"] < 6 * 73 / 0.15
    alone = simulate_row(constant(0.01), rows["LS alone, sarathi"], load, ["--device-kv-gib", "0.25"], seed=0)
    assert (alone["attained"], alone["rejected"]) == (1.0, 0) and 10 < alone["ls_requests"] < 35
    assert alone["tpot_p50_s"] == pytest.approx(0.01)

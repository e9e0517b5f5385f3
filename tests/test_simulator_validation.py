"""The parts of benchmarks.simulator_validation and simulator_served that need no engine."""

from __future__ import annotations

import math

import pytest

from benchmarks.co_serving import frontier_rows
from benchmarks.simulator_served import engine_config, line, load_of, simulate_row
from benchmarks.simulator_validation import Replay, parse_arguments, runs, table
from omniserve.latency import BatchFeatures
from omniserve.simulate.results import ClassResult
from tests.simulate.machines import Constant, constant


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


def test_a_recorded_row_is_simulated_with_its_flags_and_arrivals() -> None:
    sizes = {
        "ls_rate": 2.0, "ls_prompt": 40, "ls_output": 5, "seconds": 10.0, "be_requests": 6, "be_prompt": 64,
        "be_output": 9, "vocab_size": 100, "objectives": {"tight": [0.3, 0.06]},
    }  # fmt: skip
    load = load_of({"config": {"load": sizes}})
    rows = {row.name: row for row in frontier_rows(load.objectives, {"tight": 48})}
    row = rows["sarathi, 48 tokens a step, tight"]
    config = engine_config(["--device-kv-gib", "0.25"], row, (0.3, 0.06))
    assert (config.scheduler, config.max_step_tokens, config.device_kv_bytes) == ("sarathi", 48, 1 << 28)
    assert config.class_named("LS").slo.tpot_s == 0.06
    figures = simulate_row(constant(0.01), row, load, ["--device-kv-gib", "0.25"], seed=0)
    # 6 x 64 prompt tokens in steps of 48, LS prompts between them, and 9 outputs: the pile is over in 0.2 s or so.
    assert 6 * 73 / 0.5 < figures["be_tokens_per_s"] < 6 * 73 / 0.15
    alone = simulate_row(constant(0.01), rows["LS alone, sarathi"], load, ["--device-kv-gib", "0.25"], seed=0)
    assert (alone["attained"], alone["rejected"]) == (1.0, 0) and 10 < alone["ls_requests"] < 35
    assert alone["tpot_p50_s"] == pytest.approx(0.01)


def test_a_line_compares_what_both_have() -> None:
    text = line("fcfs", {"be_tokens_per_s": 100.0, "ttft_p50_s": 0.5, "attained": 0.0}, {
        "be_tokens_per_s": 110.0, "ttft_p50_s": 0.4, "attained": 0.0,
    })  # fmt: skip
    assert text.split() == [
        "fcfs",
        "100",
        ">",
        "110",
        "x1.10",
        "500",
        ">",
        "400",
        "x0.80",
        "-",
        "-",
        "-",
        "0",
        ">",
        "0",
        "-",
    ]

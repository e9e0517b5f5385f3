"""The parts of benchmarks.simulator_validation that need no engine."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from benchmarks.simulator_validation import Case, Replay, Run, cases, parse_arguments, report, results_of, run_of
from benchmarks.validation.errors import pairs_of, request_errors, step_errors, summed_up
from benchmarks.validation.loads import CALIBRATION, LOADS, MIB, Backlog, Mix, Slice, Stream
from omniserve import EngineConfig
from omniserve.latency import BatchFeatures, StepSample
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.load import TraceRequest, fixed_lengths
from omniserve.simulate.results import RequestResult
from omniserve.simulate.runner import StepRecord
from tests.simulate.machines import BLOCK_BYTES, Constant, constant, machine


def result(scale: float = 1.0, *, name: str = "LS", tokens: int = 11, finished: bool = True) -> RequestResult:
    """A request that comes at 1 s, waits 0.1 s, and then takes 0.01 s a token."""
    end_s = 1.0 + scale * (0.1 + 0.01 * (tokens - 1)) if finished else None
    return RequestResult(name, 1.0, 20, tokens, 1.0 + scale * 0.1, end_s, tokens if finished else 3)


def run(*results: RequestResult) -> Run:
    return Run(results, num_steps=len(results), host_share=0.5, prefilled_share=0.0)


def case(*engine: Run, scheduler: str = "fcfs", **twins: list[Run]) -> Case:
    found = Case(scheduler, "servegen", EngineConfig(), Load(), runs=list(engine), twins=twins)
    found.step_errors, found.predicted_s = {"simulated": [0.1, -0.3]}, {"simulated": 1.2, "engine": 1.0}
    return found


def test_errors_are_of_the_same_request_in_both_runs() -> None:
    real = [result(1.0, name="BE"), result(1.0), result(2.0)]
    simulated = [result(1.2), result(1.0), result(0.5, name="BE")]  # the order of the classes does not matter
    errors = request_errors(pairs_of(real, simulated))
    for figure in ("e2e_s", "ttft_s", "tpot_s"):
        assert sorted(errors[figure]) == [pytest.approx(-0.5), pytest.approx(-0.5), pytest.approx(0.2)]
    found = summed_up(errors["e2e_s"])
    assert found["mape"] == pytest.approx(0.4) and found["median"] == pytest.approx(0.5) and found["count"] == 3
    assert found["bias"] == pytest.approx(-0.8 / 3)


def test_requests_that_did_not_end_have_no_errors_and_single_tokens_no_tpot() -> None:
    pairs = pairs_of([result(), result(), result(tokens=1)], [result(finished=False), result(), result(tokens=1)])
    errors = request_errors(pairs)
    assert [len(errors[figure]) for figure in ("e2e_s", "ttft_s", "tpot_s")] == [2, 2, 1]
    with pytest.raises(ValueError, match="no request ended in both runs"):
        summed_up([])


def test_runs_of_other_requests_are_refused_but_one_may_have_begun_more() -> None:
    with pytest.raises(ValueError, match="different loads"):
        pairs_of([result(tokens=11)], [result(tokens=12)])
    assert len(pairs_of([result(name="BE")] * 3, [result(name="BE")] * 5)) == 3


def test_each_simulation_is_compared_with_the_run_of_its_repeat() -> None:
    found = case(run(result(1.0)), run(result(2.0)), simulated=[run(result(1.0)), run(result(2.0))])
    errors = found.errors()
    assert errors["simulated"]["e2e_s"] == [pytest.approx(0.0)] * 2
    assert errors["again"]["e2e_s"] == [pytest.approx(1.0), pytest.approx(-0.5)]
    seeds = case(run(result(1.0)), run(result(2.0)), calibrated=[run(result(s)) for s in (1.0, 1.5, 2.0, 3.0)])
    assert seeds.errors()["calibrated"]["ttft_s"] == [pytest.approx(e) for e in (0.0, 0.5, 0.0, 0.5)]
    assert (
        "again" not in case(run(result()), simulated=[run(result())]).errors()
    )  # what another run would be is unknown


def test_results_are_pooled_over_schedulers_and_loads() -> None:
    found = [
        case(run(result(1.0), result(1.0)), simulated=[run(result(1.1), result(0.8))]),
        case(run(result(1.0)), scheduler="sarathi", simulated=[run(result(1.3))]),
    ]
    results = results_of(found)
    assert results["all"]["all"]["requests"]["simulated"]["e2e_s"]["mape"] == pytest.approx(0.2)
    assert results["schedulers"]["sarathi"]["requests"]["simulated"]["ttft_s"]["mape"] == pytest.approx(0.3)
    assert results["loads"]["servegen"]["requests"]["simulated"]["tpot_s"]["count"] == 3
    steps = results["cases"]["fcfs, servegen"]["steps"]["simulated"]
    assert steps["mape"] == pytest.approx(0.2) and steps["time_ratio"] == pytest.approx(1.2)
    assert "sarathi, servegen" in report(results)


def test_the_error_of_a_step_is_that_of_its_prediction() -> None:
    steps = [StepSample(features=BatchFeatures(), seconds=seconds) for seconds in (0.05, 0.1)]
    assert step_errors(Constant(0.05), steps) == [pytest.approx(0.0), pytest.approx(-0.5)]


@pytest.mark.parametrize("scheduler", ["sarathi", "conserve"])
def test_replayed_steps_take_what_was_recorded_and_then_what_the_machine_says(scheduler: str) -> None:
    """Also steps that rows may leave between two layers, which are taken layer by layer."""
    replayed = dataclasses.replace(constant(0.05), spread=Replay([0.3, 0.1]))
    config = EngineConfig(scheduler=scheduler, block_size=16, device_kv_bytes=100 * BLOCK_BYTES, host_kv_bytes=0)
    load = Load(best_effort=[TraceRequest(0.0, 8, 4)])
    steps: list[StepRecord] = []
    simulate(SimulationConfig(machine=replayed, engine=config, load=load, drain_s=math.inf), on_step=steps.append)
    assert [step.seconds for step in steps] == [pytest.approx(seconds) for seconds in (0.3, 0.1, 0.05, 0.05)]


def test_a_simulation_of_the_same_machine_has_no_error() -> None:
    mix = Mix(
        device_kv_bytes=1 << 24, ls=Stream(rate=3.0, cv=2.0, lengths=fixed_lengths(20, 5)),
        be=Stream(rate=1.0, lengths=fixed_lengths(30, 9)),
    )  # fmt: skip
    config = EngineConfig(scheduler="sarathi", block_size=16, device_kv_bytes=100 * BLOCK_BYTES, host_kv_bytes=0)
    runs = [
        run_of(simulate(SimulationConfig(machine=machine(), engine=config, load=mix.load(5.0, 1)))) for _ in range(2)
    ]
    assert len(runs[0].requests) > 10
    (errors,) = case(runs[0], simulated=[runs[1]]).errors().values()
    assert set(errors["e2e_s"]) == set(errors["ttft_s"]) == {0.0}


def test_every_scheduler_meets_every_load() -> None:
    found = list(cases(parse_arguments(["--schedulers", "fcfs", "omniserve", "--seconds", "4"])))
    assert [case.name for case in found] == [
        "fcfs, servegen", "omniserve, servegen", "fcfs, azure", "omniserve, azure", "fcfs, batch", "omniserve, batch",
    ]  # fmt: skip
    assert found[0].load == found[1].load and found[0].load.duration_s == 4.0
    assert found[0].config.device_kv_bytes > found[4].config.device_kv_bytes
    with pytest.raises(SystemExit):
        parse_arguments(["--loads", "swimming"])
    with pytest.raises(SystemExit):
        parse_arguments(["--place", "ranks", "--model", "built-in"])


def test_a_faster_model_gets_more_requests_and_shorter_objectives() -> None:
    slow, fast = (next(cases(parse_arguments(["--seconds", "20", "--speed", speed]))) for speed in ("1", "10"))
    assert len(fast.load.latency_sensitive) > 5 * len(slow.load.latency_sensitive)
    tpots = [case.config.class_named("LS").slo.tpot_s for case in (slow, fast)]
    assert tpots[0] == pytest.approx(10 * (tpots[1] or 0))


def test_a_slice_of_a_trace_keeps_its_arrivals_and_scales_its_lengths(tmp_path: Path) -> None:
    rows = [(5.0, 999, 1), (10.0, 50, 7), (12.0, 400, 90), (14.0, 100, 10), (20.5, 9, 9)]
    text = "".join(f"{at_s},{tokens},{output}\n" for at_s, tokens, output in rows)
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + text)
    part = Slice(
        file="trace.csv", start_s=10.0, share=1.0, scale=0.1, most=(30, 8), rate=2.0, lengths=fixed_lengths(3, 4)
    )
    found = part.read(tmp_path, 5.0, 2.0, random.Random(0))
    assert found == [TraceRequest(0.0, 5, 1), TraceRequest(1.0, 30, 8), TraceRequest(2.0, 10, 1)]
    assert dataclasses.replace(part, share=0.0).read(tmp_path, 5.0, 2.0, random.Random(0)) == []
    mix = Mix(device_kv_bytes=MIB, ls=part, be=Backlog(size=2, lengths=fixed_lengths(1, 1)))
    assert list(mix.load(5.0, 0, speed=2.0, trace_dir=tmp_path).latency_sensitive) == found
    drawn = mix.load(50.0, 0).latency_sensitive
    assert len(drawn) > 50 and {(row.input_tokens, row.output_tokens) for row in drawn} == {(3, 4)}


def test_nothing_is_calibrated_on_what_it_is_compared_on() -> None:
    for mix in CALIBRATION:
        other = mix.load(8.0, 1)
        for held_out in LOADS.values():
            load = held_out.load(8.0, 1)
            assert load.backlog != other.backlog and held_out.ls.rate != mix.ls.rate
            assert not set(load.latency_sensitive) & set(other.latency_sensitive)
            shared = {dataclasses.astuple(request) for request in load.best_effort[:50]}
            assert len(shared & {dataclasses.astuple(request) for request in other.best_effort[:50]}) < 3

"""Several engines that share a load, and prefill engines."""

from __future__ import annotations

import dataclasses
import random

import pytest

from omniserve import SLO, PrefillConfig, Request, SamplingParams
from omniserve.core.config import EngineConfig
from omniserve.core.load import PROMPT_SIZES
from omniserve.core.stats import SchedulerStats, summed
from omniserve.routing.routers import ROUTERS
from omniserve.simulate import Load, Machine, SimulationConfig, simulate
from omniserve.simulate.engine import SimulatedEngine
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.runner import Chances, StepRecord
from tests.simulate.machines import constant, machine
from tests.simulate.test_prefill_engines import apart
from tests.simulate.test_simulate import engine, everything_ended, is_same, mixed_load


def config(
    load: Load, num_engines: int, device: Machine | None = None, settings: EngineConfig | None = None
) -> SimulationConfig:
    return SimulationConfig(
        machine=device or constant(0.01), engine=settings or engine(), load=load, num_engines=num_engines, check=True,
        drain_s=float("inf"),
    )  # fmt: skip


def test_two_engines_serve_two_requests_as_one_serves_one() -> None:
    one = simulate(config(Load(latency_sensitive=[TraceRequest(0.0, 100, 3)]), 1))
    two = simulate(config(Load(latency_sensitive=[TraceRequest(0.0, 100, 3)] * 2), 2))
    assert [request.ttft_s for request in two.requests] == [pytest.approx(0.02)] * 2
    assert {request.finished_s for request in two.requests} == {one.requests[0].finished_s}
    assert two.num_steps == 2 * one.num_steps
    assert two.classes["LS"].output_tokens_per_s == pytest.approx(2 * one.classes["LS"].output_tokens_per_s)


def test_an_idle_engine_takes_a_request_while_another_runs_a_step() -> None:
    # The first engine's step of 1 s begins at 0; the second begins as its request comes, and the third request, which
    # comes after that, waits for the engine whose step ends first.
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 1), TraceRequest(0.3, 10, 1), TraceRequest(0.4, 10, 1)])
    result = simulate(config(load, 2, constant(1.0)))
    assert [request.finished_s for request in result.requests] == pytest.approx([1.0, 1.3, 2.0])
    later = Load(latency_sensitive=[TraceRequest(0.0, 10, 1), TraceRequest(1.2, 10, 1), TraceRequest(1.4, 10, 1)])
    result = simulate(config(later, 2, constant(1.0)))
    assert [request.finished_s for request in result.requests] == pytest.approx([1.0, 2.2, 2.4])


def test_kinds_are_shared_out_each_for_itself() -> None:
    steps: list[StepRecord] = []
    load = Load(
        latency_sensitive=[TraceRequest(0.0, 10, 5)] * 4, best_effort=[TraceRequest(0.0, 10, 5)] * 2, duration_s=1.0
    )
    result = simulate(config(load, 2), on_step=steps.append)
    everything_ended(result)
    first = [step for step in steps if step.start_s == 0.0]
    assert [len(step.plan.chunks) for step in first] == [3, 3]
    assert all(sum(chunk.request_id.startswith("BE") for chunk in step.plan.chunks) == 1 for step in first)


def test_a_backlog_is_that_of_all_engines() -> None:
    load = Load(best_effort=[TraceRequest(0.0, 10, 10)], backlog=6, duration_s=1.0)
    steps: list[StepRecord] = []
    simulate(config(load, 2), on_step=steps.append)
    assert {len(step.plan.chunks) for step in steps if step.start_s < 0.9} == {3}


@pytest.mark.parametrize("placement", ["in-time", "disaggregated"])
def test_engines_share_prefill_engines(placement: str) -> None:
    device = machine(base=2.0, row=0.1)
    settings = engine(blocks=60, host_blocks=60, prefill=PrefillConfig(prefill_placement=placement))
    wanted = config(mixed_load(5, duration_s=8.0), 2, apart(device, device, beta_s=1e-9), settings)
    result = simulate(wanted)
    everything_ended(result)
    assert result.classes["LS"].prefilled_share > 0.5
    assert is_same(simulate(wanted), result)


def test_a_prefill_engine_of_two_computes_the_prompts_of_both() -> None:
    # Two prompts of 96 tokens in full blocks come at once: as one engine's, they take its steps of 64 tokens three.
    load = Load(latency_sensitive=[TraceRequest(0.0, 100, 1)] * 2, duration_s=1.0)
    settings = engine(host_blocks=100, prefill=PrefillConfig(prefill_placement="disaggregated"))
    alone, both = (
        simulate(config(load, num_engines, apart(constant(0.01), constant(0.01)), settings)) for num_engines in (1, 2)
    )
    assert both.classes["LS"].prefilled_share == pytest.approx(0.96)
    assert [request.ttft_s for request in both.requests] == [pytest.approx(r.ttft_s, abs=0.011) for r in alone.requests]


@pytest.mark.parametrize("router", ROUTERS)
def test_with_any_router_everything_ends_and_runs_are_alike(router: str) -> None:
    wanted = dataclasses.replace(
        config(mixed_load(7, duration_s=8.0), 3, machine(base=2.0, row=0.1), engine(blocks=60, host_blocks=60)),
        router=router,
    )
    result = simulate(wanted)
    everything_ended(result)
    assert is_same(simulate(wanted), result)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scheduler", ["omniserve", "omniserve-paper", "neo"])
def test_the_forecast_is_what_a_request_is_told_that_comes_then(scheduler: str, seed: int) -> None:
    """Of a request without a cached prompt, while there is no best-effort work."""
    rng, settings = random.Random(seed), engine(scheduler=scheduler, blocks=400, host_blocks=60)
    simulated = SimulatedEngine(machine(base=2.0, row=0.1), settings, Chances(0, 0.0, 0.0), caches_prefixes=False)
    compared = 0
    for number in range(60):
        size = rng.choice(PROMPT_SIZES[:3])
        load = simulated.scheduler.load(simulated.now_s, number)
        sampling = SamplingParams(max_tokens=rng.randrange(1, 9))
        request = Request(prompt_token_ids=[1] * size, sampling=sampling, slo=SLO())
        simulated.add(f"r{number}", request, arrival_s=simulated.now_s)
        told_s = simulated.stepper.requests[f"r{number}"].predicted_ttft_s
        assert load.num_taken == number
        assert load.ttft_s["LS"][PROMPT_SIZES.index(size)] == pytest.approx(told_s)
        compared += 1
        for _ in range(rng.randrange(4)):
            if simulated.stepper.has_unfinished:
                simulated.step()
    assert compared == 60


def test_counters_of_engines_are_added_up() -> None:
    one = SchedulerStats(waiting={"LS": 1}, swaps_out=2, loaded_tokens={"disk": {"LS": 3}})
    other = SchedulerStats(waiting={"LS": 5, "BE": 4}, swaps_out=1, loaded_tokens={"disk": {"LS": 1}})
    both = summed([one, other])
    assert both.waiting == {"LS": 6, "BE": 4} and both.swaps_out == 3 and both.loaded_tokens == {"disk": {"LS": 4}}


def test_what_cannot_be_is_refused() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 100, 1)])
    with pytest.raises(ValueError, match="num_engines must be >= 1, got 0"):
        config(load, 0)
    with pytest.raises(ValueError, match="rows leave no step if several engines share the load"):
        simulate(config(load, 2, settings=dataclasses.replace(engine(), scheduler="conserve")))

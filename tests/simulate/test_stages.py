"""Stages of pipeline parallel in the simulator."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from omniserve import EngineConfig, ParallelConfig
from omniserve.simulate import HostNode, Load, Machine, Result, SimulationConfig, simulate
from omniserve.simulate.load import TraceRequest
from tests.quick import slow_except
from tests.simulate.machines import DIMS, Constant, constant, machine
from tests.simulate.test_simulate import HOST, engine, everything_ended, mixed_load


def in_stages(num_stages: int, **settings: object) -> EngineConfig:
    return dataclasses.replace(engine(**settings), parallel=ParallelConfig(pipeline_parallel_size=num_stages))


def of_stages(num_stages: int, seconds: float, *, hosts: tuple[HostNode, ...] = ()) -> Machine:
    return dataclasses.replace(constant(seconds), num_stages=num_stages, hosts=hosts)


def test_steps_follow_one_another_through_the_stages() -> None:
    # A step passes two stages of 5 ms. Both prompts are in the first step, which ends at 10 ms; then each decode is in
    # a step of its own. The first's pass from 10 to 20 and from 20 to 30. The second's begins as the stage is free, at
    # 15, and ends at 25; its next one ends at 35.
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 3), TraceRequest(0.0, 10, 3)])
    result = simulate(SimulationConfig(machine=of_stages(2, 0.01), engine=in_stages(2), load=load))
    first, second = result.requests
    assert first.ttft_s == second.ttft_s == pytest.approx(0.01)
    assert (first.finished_s, second.finished_s) == (pytest.approx(0.03), pytest.approx(0.035))


def test_a_single_request_gets_nothing_of_more_stages() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 5)])
    for num_stages in (1, 2):  # the model has two layers
        config = SimulationConfig(machine=of_stages(num_stages, 0.01), engine=in_stages(num_stages), load=load)
        assert simulate(config).requests[0].finished_s == pytest.approx(0.05)


def test_many_requests_get_as_many_times_the_tokens() -> None:
    load = Load(best_effort=[TraceRequest(0.0, 1, 100) for _ in range(8)], latency_sensitive=[])
    one, two = (
        simulate(SimulationConfig(machine=of_stages(n, 0.01), engine=in_stages(n), load=load, drain_s=float("inf")))
        for n in (1, 2)
    )
    # With two stages four decode in each of two steps that are in flight: as often as with one stage.
    assert two.num_steps == pytest.approx(2 * one.num_steps, rel=0.02)
    assert two.end_s == pytest.approx(one.end_s, rel=0.02)


@pytest.mark.parametrize(
    ("name", "host_blocks"),
    slow_except(
        {("sarathi", 0), ("omniserve", 200), ("apex", 200), ("fcfs", 200), ("priority", 0), ("llumnix", 200)},
        itertools.product(("sarathi", "omniserve", "apex", "fcfs", "priority", "llumnix"), (0, 200)),
    ),
)
def test_every_request_ends(name: str, host_blocks: int) -> None:
    device = dataclasses.replace(machine(base=2.0, row=0.1), num_stages=2, hosts=(HOST,) if host_blocks else ())
    device = dataclasses.replace(device, late_layers=2)
    config = in_stages(2, scheduler=name, blocks=60, host_blocks=host_blocks, strategy="overlapped")
    settings = SimulationConfig(
        machine=device, engine=config, load=mixed_load(3, duration_s=5.0), check=True, drain_s=float("inf"), noise=0.1
    )
    result = simulate(settings)
    everything_ended(result)
    assert simulate(dataclasses.replace(settings, check=False)).requests == result.requests


@pytest.mark.parametrize("scheduler", ["llumnix", "apex"])
def test_a_host_token_takes_one_step_a_layer_with_late_joins_as_steps_pass_the_stages(scheduler: str) -> None:
    dims = dataclasses.replace(DIMS, num_layers=8)
    device = Constant(0.008)
    device.num_layers = 8
    fast = HostNode(num_threads=8, key_s=1e-8, task_s=1e-7, latency_s=1e-6)
    where = dataclasses.replace(
        machine(hosts=(fast,), copy_s=0.001), spec=dims.spec, device=device, forecast=device, num_stages=4
    )
    options = {"strategy": "overlapped", "min_host_per_device": 0}
    config = SimulationConfig(
        machine=where, load=mixed_load(3, duration_s=4.0, backlog=40), check=True,
        engine=in_stages(4, scheduler=scheduler, blocks=60, host_blocks=400, max_piggyback_seats=64, **options),
    )  # fmt: skip

    def run(late_layers: int) -> Result:
        result = simulate(dataclasses.replace(config, machine=dataclasses.replace(where, late_layers=late_layers)))
        assert result.host_share > 0.05
        return result

    # Without them a token waits until its stage has told its result, and for a step that is launched after that.
    without, with_late = run(0), run(8)
    assert with_late.host_steps_per_layer < 1.4 and without.host_steps_per_layer > 3, (with_late, without)


def test_settings_for_another_number_of_stages_are_refused() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 3)])
    with pytest.raises(ValueError, match="has 1 stages: set pipeline_parallel_size to that, not to 2"):
        simulate(SimulationConfig(machine=constant(0.01), engine=in_stages(2), load=load))
    with pytest.raises(ValueError, match="not for scheduler='neo'"):
        simulate(SimulationConfig(machine=of_stages(2, 0.01), engine=in_stages(2, scheduler="neo"), load=load))

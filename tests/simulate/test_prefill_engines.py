"""Prefill engines in the simulator."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from omniserve import PrefillConfig
from omniserve.latency.features import AlphaBeta
from omniserve.simulate import Load, Machine, PrefillNode, SimulationConfig, simulate
from omniserve.simulate.load import TraceRequest
from tests.quick import slow_except
from tests.simulate.machines import BLOCK_BYTES, constant, machine
from tests.simulate.test_simulate import HOST, engine, everything_ended, mixed_load


def apart(here: Machine, *there: Machine, alpha_s: float = 0.001, beta_s: float = 0.0) -> Machine:
    """Return a machine with prefill engines; all have a host."""
    here, *there = [dataclasses.replace(each, hosts=(HOST,)) for each in (here, *there)]
    nodes = tuple(PrefillNode(machine=each, link=AlphaBeta(alpha_s, beta_s)) for each in there)
    return dataclasses.replace(here, prefill_engines=nodes)


def test_the_first_token_comes_when_all_has_come_and_the_rest_is_computed() -> None:
    # 96 of 100 tokens are full blocks. The engine is asked at 0 and hears of it at 1 ms; its steps of 64 and 32 tokens
    # end at 11 and 21 ms. The last blocks are copied to its host, which it sees at 22 ms, and they are here at 23 ms
    # or, with a link that takes 6 ms for each block, when all six have come. Then 4 tokens take a step.
    load = Load(latency_sensitive=[TraceRequest(0.0, 100, 1)], duration_s=1.0)
    for block_s, here_s in ((0.0, 0.023), (0.006, 0.021 + 6 * 0.006 + 0.001)):
        both = apart(constant(0.01), constant(0.01), beta_s=block_s / BLOCK_BYTES)
        result = simulate(SimulationConfig(machine=both, engine=engine(host_blocks=100), load=load))
        assert result.requests[0].ttft_s == pytest.approx(here_s + 0.01, abs=0.003)
        assert result.classes["LS"].prefilled_share == pytest.approx(0.96)
        assert result.num_steps == 1


def test_a_chats_kv_does_not_wait_for_a_step_of_batch_work() -> None:
    # There is always best-effort work, in steps of 0.5 s. A chat comes 0.2 s before one ends, is in the next two, as
    # other prompts are not done yet, and its KV is sent at the end of these, after 1.2 s, not a step later.
    load = Load(
        latency_sensitive=[TraceRequest(2.3 + 3 * n, 100, 2) for n in range(6)],
        best_effort=[TraceRequest(0.0, 200, 1) for _ in range(400)], duration_s=20.0,
    )  # fmt: skip
    config = engine(host_blocks=9000, scheduler="priority", prefill=PrefillConfig(prefill_placement="always"))
    config = dataclasses.replace(config, max_num_batched_tokens=128)
    result = simulate(SimulationConfig(machine=apart(constant(0.01), constant(0.5)), engine=config, load=load))
    assert [each.num_cached_tokens for each in result.requests if each.service_class == "LS"] == [96] * 6
    assert max(each.ttft_s or 9.0 for each in result.requests if each.service_class == "LS") < 1.3


def test_decodes_are_not_disturbed_by_prompts_that_are_computed_elsewhere() -> None:
    # A step of 64 rows takes 66 ms or more, one of a decode and the end of a prompt at most 20.
    device = machine(base=2.0, row=1.0)
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 40), *(TraceRequest(0.1 * n, 170, 1) for n in range(1, 4))])
    config = engine(host_blocks=100, scheduler="fcfs", prefill=PrefillConfig(prefill_placement="always"))
    here, there = (
        simulate(SimulationConfig(machine=each, engine=config, load=load)) for each in (device, apart(device, device))
    )
    assert here.requests[0].tpot_s is not None and there.requests[0].tpot_s is not None
    assert there.requests[0].tpot_s < 0.5 * here.requests[0].tpot_s
    everything_ended(there)


def test_prompts_are_shared_out_to_several_engines() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 200, 1) for _ in range(8)])
    config = engine(host_blocks=200, prefill=PrefillConfig(prefill_placement="always"))
    ends = [
        simulate(SimulationConfig(machine=apart(constant(0.01), *there), engine=config, load=load)).end_s
        for there in ([constant(0.05)], [constant(0.05)] * 2)
    ]
    assert ends[1] == pytest.approx(ends[0] / 2, rel=0.15)


def test_prompts_stay_here_if_the_engine_is_slower() -> None:
    load = Load(latency_sensitive=[TraceRequest(2.0 * n, 200, 2) for n in range(12)])
    slow = apart(constant(0.01), constant(0.4))
    result = simulate(SimulationConfig(machine=slow, engine=engine(host_blocks=100), load=load))
    assert result.classes["LS"].prefilled_share < 0.3  # it is tried now and then
    assert result.classes["LS"].ttft_p50_s < 0.1


@pytest.mark.parametrize(
    ("name", "placement"),
    slow_except(
        {
            ("sarathi", "in-time"),
            ("omniserve", "sooner"),
            ("llumnix", "always"),
            ("neo", "in-time"),
            ("sarathi", "disaggregated"),
        },
        itertools.product(("sarathi", "omniserve", "llumnix", "neo"), ("in-time", "sooner", "always", "disaggregated")),
    ),
)
def test_every_request_ends(name: str, placement: str) -> None:
    device = machine(base=2.0, row=0.1)
    prefill = PrefillConfig(prefill_placement=placement)
    settings = SimulationConfig(
        machine=apart(device, device, device, beta_s=1e-9), load=mixed_load(5, duration_s=8.0), check=True,
        drain_s=float("inf"),
        engine=engine(scheduler=name, blocks=60, host_blocks=60, prefill=prefill), noise=0.1,
    )  # fmt: skip
    result = simulate(settings)
    everything_ended(result)
    assert result.classes["LS"].prefilled_share > 0
    assert simulate(settings).requests == result.requests


def test_recurrent_states_take_their_time_on_the_link() -> None:
    """The states are sent when the prompt is computed, behind its KV; then the rest of it is computed in one step
    here."""
    load = Load(latency_sensitive=[TraceRequest(0.0, 100, 1)], duration_s=1.0)
    both = apart(constant(0.01), constant(0.01), beta_s=2e-7)
    with_states, ttfts = dataclasses.replace(both.spec, state_bytes=50_000), []
    nodes = tuple(
        dataclasses.replace(
            each, machine=dataclasses.replace(each.machine, spec=with_states), link=AlphaBeta(0.001, beta)
        )
        for each, beta in zip(both.prefill_engines * 2, (0.0, 2e-7), strict=True)
    )
    for node in nodes:
        here = dataclasses.replace(both, spec=with_states, prefill_engines=(node,))
        config = dataclasses.replace(engine(host_blocks=100), max_num_seqs=4, max_host_requests=2)
        config = dataclasses.replace(config, device_kv_bytes=config.device_kv_bytes + 10 * 50_000)
        result = simulate(SimulationConfig(machine=here, engine=config, load=load, check=True))
        assert result.classes["LS"].prefilled_share == pytest.approx(0.96) and result.num_steps == 1
        ttfts.append(result.requests[0].ttft_s)
    num_bytes = 6 * BLOCK_BYTES + 50_000
    assert ttfts[1] == pytest.approx(ttfts[0] + 2e-7 * num_bytes, rel=0.05)


def test_what_cannot_be_is_refused() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 100, 1)])
    both = apart(constant(0.01), constant(0.01))
    for config in (engine(), engine(host_blocks=50, kv="paged")):
        with pytest.raises(ValueError, match="needs a host tier and prefixes on it"):
            simulate(SimulationConfig(machine=both, engine=config, load=load))
    config = engine(host_blocks=50)
    (node,) = both.prefill_engines
    node = dataclasses.replace(node, config=dataclasses.replace(config, block_size=32))
    other = dataclasses.replace(both, prefill_engines=(node,))
    with pytest.raises(ValueError, match="block_size=32, and the engine that asks it 16"):
        simulate(SimulationConfig(machine=other, engine=config, load=load))

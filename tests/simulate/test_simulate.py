"""simulate: the scheduler and KV manager of the engine on a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from omniserve import SLO, ClassSpec, DiskKVConfig, EngineConfig
from omniserve.sched import SCHEDULERS
from omniserve.simulate import HostNode, Load, Result, SimulationConfig, simulate
from omniserve.simulate.load import TraceRequest, lognormal_lengths, poisson, requests
from omniserve.simulate.runner import StepRecord
from tests.engine_settings import flat_config
from tests.quick import slow_except
from tests.simulate.machines import BLOCK_BYTES, constant, machine

HOST = HostNode(num_threads=2, key_s=1e-5, task_s=1e-5, latency_s=1e-5)


def engine(*, blocks: int = 200, host_blocks: int = 0, **settings: object) -> EngineConfig:
    values: dict[str, object] = {
        "block_size": 16, "device_kv_bytes": blocks * BLOCK_BYTES, "host_kv_bytes": host_blocks * BLOCK_BYTES,
        "max_num_batched_tokens": 64, "scheduler": "sarathi",
        "classes": (ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=1.0, tpot_s=0.1)), ClassSpec(name="BE", kind="BE")),
    }  # fmt: skip
    return flat_config({**values, **settings})


def mixed_load(seed: int, *, duration_s: float = 20.0, backlog: int = 0) -> Load:
    rng = random.Random(seed)
    lengths = lognormal_lengths(60, 12, max_input=400, max_output=60)
    ls = requests(poisson(1.5, duration_s, rng), lengths, rng)
    be = requests(poisson(2.0, duration_s, rng), lengths, rng)
    return Load(latency_sensitive=ls, best_effort=be, backlog=backlog, duration_s=duration_s)


def some_of(seeds: Sequence[int]) -> list[Any]:
    """Return every policy with each of these seeds, of which a run without ``--slow`` takes one for each policy."""
    quick = {(name, seeds[index % len(seeds)]) for index, name in enumerate(SCHEDULERS.names())}
    return slow_except(quick, itertools.product(SCHEDULERS.names(), seeds))


def is_same(one: Result, other: Result) -> bool:
    return dataclasses.replace(one, wall_s=0.0) == dataclasses.replace(other, wall_s=0.0)


def everything_ended(result: Result) -> None:
    for request in result.requests:
        assert request.rejected or request.num_output_tokens == request.output_tokens
        assert request.rejected or request.finished_s is not None


def test_requests_that_come_at_once_are_added_in_the_loads_order() -> None:
    """Regression: the last one of a pile was served first."""
    load = Load(
        latency_sensitive=[TraceRequest(0.0, 30, 2)], best_effort=[TraceRequest(0.0, 40 + i, 1) for i in range(3)]
    )
    result = simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load, drain_s=math.inf))
    assert [request.input_tokens for request in result.requests] == [30, 40, 41, 42]
    firsts = [request.first_token_s or 0.0 for request in result.requests]
    assert firsts == sorted(firsts) and firsts[1] < firsts[3]


def test_times_of_constant_steps_are_those_reckoned_by_hand() -> None:
    # Steps of 10 ms and 64 tokens. The first comes at 0: two steps of prefill, so its first token is at 20 ms and the
    # last of 3 at 40. The second comes at 5 ms, during the first step. Beside the rest of the first prompt, 36 tokens,
    # there is room for 28 of its 30 tokens; its last two come in the step that ends at 30 ms.
    load = Load(latency_sensitive=[TraceRequest(0.0, 100, 3), TraceRequest(0.005, 30, 2)])
    result = simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load))
    first, second = result.requests
    assert (first.ttft_s, first.finished_s) == (pytest.approx(0.02), pytest.approx(0.04))
    assert first.tpot_s == pytest.approx(0.01)
    assert (second.ttft_s, second.tpot_s) == (pytest.approx(0.025), pytest.approx(0.01))
    assert result.num_steps == 4
    ls = result.classes["LS"]
    assert (ls.attainment, ls.num_finished) == (1.0, 2)


def test_idle_time_is_skipped() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 1), TraceRequest(5000.0, 10, 1)])
    result = simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load))
    assert result.num_steps == 2
    assert [request.finished_s for request in result.requests] == [pytest.approx(0.01), pytest.approx(5000.01)]


def test_rates_and_attainment_are_of_the_load() -> None:
    # 100 ms steps, one request of 11 tokens: its last 10 take a second. The objective is 50 ms a token.
    slow = ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=0.15, tpot_s=0.05))
    config = engine(classes=(slow, ClassSpec(name="BE", kind="BE")))
    load = Load(latency_sensitive=[TraceRequest(0.0, 16, 11)], duration_s=2.0)
    ls = simulate(SimulationConfig(machine=constant(0.1), engine=config, load=load)).classes["LS"]
    assert (ls.ttft_attainment, ls.tpot_attainment, ls.attainment, ls.goodput) == (1.0, 0.0, 0.0, 0.0)
    assert ls.output_tokens_per_s == pytest.approx(11 / 2)
    assert ls.prompt_tokens_per_s == pytest.approx(16 / 2)


@pytest.mark.parametrize(("name", "seed"), some_of(range(4)))
def test_random_histories_end_with_exactly_their_tokens(name: str, seed: int) -> None:
    config = SimulationConfig(
        machine=machine(
            hosts=(HOST,) * (1 + seed % 3), copy_s=0.003, by_host_threads=seed % 2 == 0, base=5.0, row=0.2, key=0.001
        ),
        engine=engine(
            scheduler=name, blocks=40, host_blocks=60, swap_in_delay_s=0.05, min_residence_s=0.1,
            max_piggyback_seats=4, checkpoint_kv=seed == 3,
        ),
        load=mixed_load(seed, duration_s=5.0, backlog=8 if seed % 2 else 0),
        noise=0.2 if seed else 0.0, seed=seed, drain_s=math.inf, check=True,
    )  # fmt: skip
    result = simulate(config)
    assert is_same(simulate(dataclasses.replace(config, check=False)), result)
    if seed % 2:  # what is left of the pile when the load ends is not begun
        assert len(result.requests) > 10
    everything_ended(result)


def test_another_seed_gives_another_result() -> None:
    config = SimulationConfig(
        machine=machine(hosts=(HOST,)), engine=engine(scheduler="omniserve", blocks=40, host_blocks=60),
        load=mixed_load(1, duration_s=5.0), noise=0.1, seed=1,
    )  # fmt: skip
    assert not is_same(simulate(config), simulate(dataclasses.replace(config, seed=2)))


def test_best_effort_requests_decode_on_the_host_tier_when_memory_is_short() -> None:
    config = SimulationConfig(
        machine=machine(hosts=(HOST,), copy_s=0.001, base=2.0, row=0.05, key=0.0),
        engine=engine(scheduler="omniserve", blocks=30, host_blocks=200),
        load=mixed_load(3, duration_s=4.0, backlog=20),
    )  # fmt: skip
    result = simulate(config)
    assert 0.05 < result.host_share <= 1.0
    assert result.swaps_out > 0 and result.host_tier_busy > 0
    assert sum(request.num_host_tokens for request in result.requests) > 0
    without = simulate(dataclasses.replace(config, engine=dataclasses.replace(config.engine, host_kv_bytes=0)))
    assert without.host_share == 0.0 and without.swaps_out == 0


def test_a_host_token_takes_one_step_a_layer_with_late_joins_and_two_without() -> None:
    fast = HostNode(num_threads=2, key_s=1e-8, task_s=1e-7, latency_s=1e-6)
    config = SimulationConfig(
        machine=machine(hosts=(fast,), copy_s=0.001, base=2.0, row=0.05, key=0.0),
        engine=engine(scheduler="llumnix", blocks=30, host_blocks=200, max_piggyback_seats=64),
        load=mixed_load(3, duration_s=4.0, backlog=20),
    )  # fmt: skip
    before = simulate(config)
    num_layers = config.machine.spec.num_layers

    def steps_a_layer(late_layers: int) -> float:
        changed = dataclasses.replace(config.machine, late_layers=late_layers)
        return simulate(dataclasses.replace(config, machine=changed)).host_steps_per_layer

    assert 1.0 <= steps_a_layer(num_layers) < 1.06
    assert 1.0 <= steps_a_layer(num_layers - 1) < 1.06, "the next step is planned when this one has ended"
    assert before.host_steps_per_layer > 1.9


class Counted:
    """Steps take what is predicted; notes for how many a ratio was drawn."""

    count = 0

    def draws(self, rng: random.Random) -> Callable[[float], float]:
        def draw(predicted_s: float) -> float:
            self.count += 1
            return 1.0

        return draw


def test_one_ratio_is_drawn_for_each_step_also_if_host_results_are_late() -> None:
    """Steps without device rows whose host rows miss them run fewer layers, but are no second step."""
    slow, ratios = HostNode(num_threads=1, key_s=1e-3, task_s=1e-4, latency_s=1e-3), Counted()
    where = machine(hosts=(slow,), copy_s=0.001, base=2.0, row=0.05, key=0.0)
    steps: list[StepRecord] = []
    result = simulate(
        SimulationConfig(
            machine=dataclasses.replace(where, late_layers=where.spec.num_layers, spread=ratios),
            engine=engine(scheduler="llumnix", blocks=30, host_blocks=200, max_piggyback_seats=64),
            load=mixed_load(3, duration_s=4.0, backlog=20),
        ),
        on_step=steps.append,
    )  # fmt: skip
    assert any(not step.plan.chunks and step.plan.joins for step in steps)
    assert ratios.count == result.num_steps == len(steps)


def test_right_drafts_are_tokens_and_wrong_ones_are_nothing() -> None:
    speculative = tuple(dataclasses.replace(spec, speculation=True) for spec in engine().classes)
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 30)])

    def run(drafts_right: float) -> Result:
        config = dataclasses.replace(engine(), classes=speculative)
        return simulate(
            SimulationConfig(machine=constant(0.01), engine=config, load=load, drafts_right=drafts_right, check=True)
        )

    without, always, seldom = run(0.0), run(1.0), run(0.01)
    for result in (without, always, seldom):
        everything_ended(result)
    assert run(0.01).requests == seldom.requests
    assert without.num_steps == 30 and without.accepted_drafts == without.rejected_drafts == 0
    assert always.num_steps < 10 and always.rejected_drafts == 0
    assert always.accepted_drafts == 30 - always.num_steps, "each step brings one token, and its right drafts"
    assert 28 <= seldom.num_steps <= 30 and seldom.rejected_drafts < 10, "a request that guesses wrong stops guessing"


def test_host_tokens_with_right_drafts_take_fewer_steps_a_layer() -> None:
    fast = HostNode(num_threads=2, key_s=1e-8, task_s=1e-7, latency_s=1e-6, draft_key_s=1e-9)
    base = engine(scheduler="llumnix", blocks=30, host_blocks=200, max_piggyback_seats=64)
    classes = tuple(dataclasses.replace(spec, speculation=spec.kind == "BE") for spec in base.classes)
    where = machine(hosts=(fast,), copy_s=0.001, base=2.0, row=0.05, key=0.0)
    config = SimulationConfig(
        machine=dataclasses.replace(where, late_layers=where.spec.num_layers),
        engine=dataclasses.replace(base, classes=classes), load=mixed_load(3, duration_s=4.0, backlog=20), check=True,
    )  # fmt: skip
    assert 1.0 <= simulate(config).host_steps_per_layer < 1.06
    result = simulate(dataclasses.replace(config, drafts_right=0.8))
    assert result.host_steps_per_layer < 0.6
    assert 0.5 < result.accepted_drafts / (result.accepted_drafts + result.rejected_drafts) < 0.9


def test_a_backlog_is_kept_full_until_the_load_ends() -> None:
    pile = [TraceRequest(0.0, 20, 5)] * 50
    load = Load(best_effort=pile, backlog=6, duration_s=2.0)
    seen: list[int] = []

    def watch(step: StepRecord) -> None:
        seen.append(len(step.plan.chunks))

    result = simulate(
        SimulationConfig(machine=constant(0.01), engine=engine(scheduler="omniserve"), load=load), on_step=watch
    )
    assert max(seen) == 6
    assert result.end_s == pytest.approx(2.0, abs=0.02)
    assert 50 < len(result.requests) < 500
    assert result.classes["BE"].num_finished >= len(result.requests) - 6


def test_a_warm_up_is_left_out() -> None:
    arrivals = [TraceRequest(float(i), 16, 10) for i in range(10)]
    load = Load(latency_sensitive=arrivals, duration_s=10.0, warm_up_s=4.0)
    result = simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load))
    assert (result.duration_s, len(result.requests)) == (6.0, 6)
    ls = result.classes["LS"]
    assert ls.output_tokens_per_s == pytest.approx(10.0) and ls.prompt_tokens_per_s == pytest.approx(16.0)
    with pytest.raises(ValueError, match="warm_up_s"):
        late = dataclasses.replace(load, warm_up_s=10.0)
        SimulationConfig(machine=constant(0.01), engine=engine(), load=late)


def test_a_run_ends_after_its_drain_and_unfinished_requests_missed() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 2000)], duration_s=1.0)
    result = simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load, drain_s=2.0))
    assert result.end_s == pytest.approx(3.0, abs=0.02)
    assert result.requests[0].finished_s is None and result.classes["LS"].attainment == 0.0


def test_requests_that_are_too_long_are_left_out_and_counted() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 2), TraceRequest(0.0, 10_000, 2)])
    result = simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load))
    assert (result.num_too_long, len(result.requests)) == (1, 1)
    with pytest.raises(ValueError, match="none of the 1 requests fits: a request may have 4096 tokens"):
        simulate(
            SimulationConfig(machine=constant(0.01), engine=engine(), load=Load(best_effort=[TraceRequest(0, 9999, 9)]))
        )
    ls, be = [TraceRequest(0, 9, 9)], [TraceRequest(0, 9999, 9)]
    nothing_to_draw = Load(latency_sensitive=ls, best_effort=be, backlog=2, duration_s=1.0)
    with pytest.raises(ValueError, match="none of the 1 best-effort requests of the backlog fits"):
        simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=nothing_to_draw))


def test_rejected_requests_miss_their_objectives() -> None:
    # A prompt of 320 tokens is five steps of 100 ms; its first token is wanted after one second, and so is that of the
    # second one, which waits for the first.
    load = Load(latency_sensitive=[TraceRequest(0.0, 320, 2), TraceRequest(0.0, 320, 2)], duration_s=1.0)
    result = simulate(
        SimulationConfig(machine=constant(0.1), engine=engine(scheduler="omniserve"), load=load)
    )  # fmt: skip
    ls = result.classes["LS"]
    assert (ls.num_rejected, ls.ttft_attainment, ls.attainment) == (1, 0.5, 0.5)


@pytest.mark.parametrize("keep_halted", [True, False])
def test_best_effort_rows_leave_a_step_for_a_request_that_would_be_late(keep_halted: bool) -> None:
    # A row takes 50 ms in each of two layers. 48 best-effort rows are under way for 4.8 s when, during the first layer,
    # a request comes whose first token is wanted within 4 s: they leave after 2.4 s. In the next step its four rows run
    # beside the second half of those 48, or beside as many as the budget of 64 lets begin anew.
    classes = ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=4.0, tpot_s=20.0)), ClassSpec(name="BE", kind="BE")
    steps: list[StepRecord] = []
    result = simulate(
        SimulationConfig(
            machine=machine(base=0.0, row=100.0, key=0.0),
            engine=engine(scheduler="conserve", keep_halted=keep_halted, classes=classes),
            load=Load(latency_sensitive=[TraceRequest(1.0, 4, 1)], best_effort=[TraceRequest(0.0, 64, 1)]),
            drain_s=math.inf,
            check=True,
        ),
        on_step=steps.append,
    )
    assert [step.seconds for step in steps[:2]] == pytest.approx([2.4, 2.8 if keep_halted else 6.4], rel=1e-3)
    everything_ended(result)


def test_noise_keeps_the_mean() -> None:
    seconds: list[float] = []
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 3000)])
    config = SimulationConfig(machine=constant(0.01), engine=engine(), load=load, noise=0.3, drain_s=math.inf)
    simulate(config, on_step=lambda step: seconds.append(step.seconds))
    assert len(seconds) == 3000 and len(set(seconds)) > 2900
    assert sum(seconds) / len(seconds) == pytest.approx(0.01, rel=0.03)


def test_progress_is_told_of_simulated_time() -> None:
    told: list[float] = []
    load = Load(latency_sensitive=[TraceRequest(float(i), 10, 2) for i in range(10)])
    simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load), progress=told.append)
    assert told == sorted(told) and 8 <= len(told) <= 10


@pytest.mark.slow
def test_thirty_simulated_minutes_finish() -> None:
    config = SimulationConfig(
        machine=machine(hosts=(HOST,), base=30.0, row=0.1, key=0.0001),
        engine=engine(scheduler="omniserve", blocks=100, host_blocks=100),
        load=mixed_load(0, duration_s=1800.0, backlog=10),
    )
    result = simulate(config)
    assert result.end_s >= 1800 and result.classes["LS"].num_finished > 2000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load": Load()}, "no requests"),
        ({"load": Load(latency_sensitive=[TraceRequest(0, 1, 1)], backlog=2)}, "backlog needs"),
        ({"load": Load(best_effort=[TraceRequest(0, 1, 1)], backlog=2)}, "no end of its own"),
        ({"load": Load(latency_sensitive=[TraceRequest(0, 1, 1)], duration_s=0.0)}, "duration_s"),
        ({"load": Load(best_effort=[TraceRequest(0, 1, 1)], backlog=-1)}, "backlog must be"),
        ({"drain_s": -1.0}, "drain_s"),
        ({"noise": -1.0}, "noise"),
        ({"engine": engine(device_kv_bytes=1)}, "less than one KV block"),
        ({"engine": engine(scheduler="nobody")}, "unknown scheduler"),
    ],
)
def test_what_cannot_be_simulated_is_said(change: dict[str, object], said: str) -> None:
    values: dict[str, object] = {
        "machine": constant(0.01), "engine": engine(), "load": Load(latency_sensitive=[TraceRequest(0, 1, 1)]),
        **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        simulate(SimulationConfig(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize("defers", [True, False])
def test_rows_of_a_lower_class_are_deferred_for_a_request_that_would_be_late(defers: bool) -> None:
    # As above, with a prompt of a lower class instead of best-effort rows. Beside the rest of it the request would be
    # late: that waits for the step behind it. Without the option the request waits for the end of the running step.
    classes = (
        ClassSpec(name="GOLD", kind="LS", slo=SLO(ttft_s=4.0)),
        ClassSpec(name="SILVER", kind="LS", slo=SLO(ttft_s=60.0)),
        ClassSpec(name="BE", kind="BE"),
    )
    steps: list[StepRecord] = []
    load = Load(latency_sensitive=[TraceRequest(0.0, 48, 1, "SILVER"), TraceRequest(1.0, 4, 1)])
    result = simulate(
        SimulationConfig(
            machine=machine(base=0.0, row=100.0, key=0.0, sample=0.0), load=load, drain_s=math.inf, check=True,
            engine=engine(scheduler="omniserve", classes=classes, defer_classes=defers, admission=False),
        ),
        on_step=steps.append,
    )  # fmt: skip
    assert [step.seconds for step in steps] == pytest.approx([2.4, 0.4, 2.4] if defers else [4.8, 0.4])
    assert result.classes["GOLD"].attainment == defers and result.classes["SILVER"].attainment == 1.0
    everything_ended(result)


@pytest.mark.parametrize("mode", ["off", "late", "always"])
def test_decodes_of_a_lower_class_pass_some_layers_of_a_step(mode: str) -> None:
    # A row takes 50 ms in each of two layers. SILVER's passes one of them in each step.
    classes = (
        ClassSpec(name="GOLD", kind="LS", slo=SLO(ttft_s=60.0, tpot_s=0.16)),
        ClassSpec(name="SILVER", kind="LS", slo=SLO(ttft_s=60.0, tpot_s=10.0)),
        ClassSpec(name="BE", kind="BE"),
    )
    load = Load(latency_sensitive=[TraceRequest(0.0, 4, 12, "GOLD"), TraceRequest(0.0, 4, 6, "SILVER")])
    result = simulate(
        SimulationConfig(
            machine=machine(base=0.0, row=100.0, key=0.0, sample=0.0), load=load, drain_s=math.inf, check=True,
            engine=engine(scheduler="omniserve", classes=classes, defer_tokens=mode, slack="step", admission=False),
        )
    )  # fmt: skip
    times = sorted(request.tpot_s or 0.0 for request in result.requests)
    if mode == "off":  # SILVER ends first; GOLD's last steps are alone
        assert times == pytest.approx([(5 * 0.2 + 6 * 0.1) / 11, 0.2])
    else:
        assert times == pytest.approx([(10 * 0.15 + 0.1) / 11, 0.3])
    everything_ended(result)


def test_a_request_names_a_class_of_its_kind() -> None:
    for name, message in (("BE", "is of kind BE"), ("GOLD", "there is no class 'GOLD'")):
        load = Load(latency_sensitive=[TraceRequest(0.0, 4, 1, name)])
        with pytest.raises(ValueError, match=message):
            simulate(SimulationConfig(machine=constant(0.01), engine=engine(), load=load))


def test_a_prompt_begins_behind_what_an_earlier_one_has_left() -> None:
    # Steps of 10 ms and 64 tokens, blocks of 16: of 200 tokens 192 are in 12 full blocks.
    load = Load(
        latency_sensitive=[
            TraceRequest(0.0, 200, 1, hash_ids=(1, 2, 3)), TraceRequest(1.0, 200, 1, hash_ids=(1, 2, 4)),
            TraceRequest(2.0, 200, 1), TraceRequest(3.0, 200, 1, hash_ids=(1, 2, 4)),
        ],
        hash_tokens=64, duration_s=4.0,
    )  # fmt: skip
    config = SimulationConfig(machine=constant(0.01), engine=engine(), load=load)
    result = simulate(config)
    assert [request.num_cached_tokens for request in result.requests] == [0, 128, 0, 192]
    assert [request.ttft_s for request in result.requests] == pytest.approx([0.04, 0.02, 0.04, 0.01])
    assert result.classes["LS"].cached_share == pytest.approx(320 / 800)
    off = simulate(dataclasses.replace(config, engine=engine(prefix_cache=False)))
    assert off.classes["LS"].cached_share == 0 and off.requests[3].ttft_s == pytest.approx(0.04)


def with_fronts(load: Load, seed: int) -> Load:
    """Let prompts begin with one of a few texts."""
    rng = random.Random(seed)

    def fronted(rows: Sequence[TraceRequest]) -> list[TraceRequest]:
        return [dataclasses.replace(row, hash_ids=(rng.randrange(3), rng.randrange(5))) for row in rows]

    return dataclasses.replace(
        load, latency_sensitive=fronted(load.latency_sensitive), best_effort=fronted(load.best_effort), hash_tokens=32
    )


@pytest.mark.parametrize(("scheduler", "seed"), some_of(range(2)))
def test_prefixes_lose_nothing_under_any_policy(scheduler: str, seed: int) -> None:
    load = with_fronts(mixed_load(seed, duration_s=5.0, backlog=seed * 8), seed)
    settings = engine(scheduler=scheduler, kv="tiered", blocks=40, host_blocks=60)
    config = SimulationConfig(
        machine=machine(hosts=(HOST,), base=5.0, row=0.1), engine=settings, load=load, check=True,
        drain_s=math.inf if seed == 0 else None,
    )  # fmt: skip
    result = simulate(config)
    if seed == 0:
        everything_ended(result)
    assert result.classes["LS"].cached_share > 0
    assert is_same(simulate(dataclasses.replace(config, check=False)), result)


def test_what_a_machine_cannot_have_is_refused() -> None:
    load = Load(latency_sensitive=[TraceRequest(0.0, 200, 1)])
    for settings, message in (
        (engine(disk_kv=DiskKVConfig(gib=1.0), host_blocks=100), "no disk"),
        (engine(kv="bidirectional", prefix_cache=True), "tiered"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            simulate(SimulationConfig(machine=constant(0.01), engine=settings, load=load))
    with pytest.raises(ValueError, match="hash_tokens"):
        SimulationConfig(machine=constant(0.01), engine=engine(), load=dataclasses.replace(load, hash_tokens=0))

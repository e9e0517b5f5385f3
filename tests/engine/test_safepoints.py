"""Best-effort rows leave a step between layers: what the engine does with them, and when it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from omniserve import Engine, Request, SamplingParams
from omniserve.core.plan import StepPlan
from omniserve.core.request import Arrival
from omniserve.runner.safepoint import LayerPreemption
from tests.sched import preemptible

MakeEngine = Callable[..., Engine]


def request(service_class: str, length: int = 24, output: int = 4) -> Request:
    return Request(
        prompt_token_ids=list(range(1, length + 1)),
        sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        service_class=service_class,
    )


def watch(engine: Engine, arrivals: Callable[[], list[Arrival]]) -> None:
    assert engine.preemption is not None
    engine.preemption.arrivals = arrivals


def halted_rows(engine: Engine) -> Mapping[str, object]:
    (strategy,) = (each for each in engine.runner.strategies if isinstance(each, LayerPreemption))
    return strategy.halted.rows


def tokens_of(engine: Engine, request_id: str, steps: int = 50) -> list[int]:
    tokens: list[int] = []
    for _ in range(steps):
        for output in engine.step():
            if output.request_id == request_id:
                tokens += output.new_token_ids
        if not engine.has_unfinished:
            break
    return tokens


@pytest.mark.parametrize("keep", [True, False])
def test_rows_go_on_at_their_layer_or_begin_anew(make_engine: MakeEngine, keep: bool) -> None:
    quiet = make_engine(scheduler=preemptible.NAME)
    expected = tokens_of(quiet, quiet.add(request("BE")))

    engine = make_engine(scheduler=preemptible.NAME, scheduler_options={"keep_halted": keep})
    plans: list[StepPlan] = []
    engine.on_step = lambda plan, host_works, seconds: plans.append(plan)
    asked: list[int] = []

    def arrivals() -> list[Arrival]:
        asked.append(len(plans))
        return [Arrival(request("LS"))] if not plans else []  # in the first step, before its second layer

    watch(engine, arrivals)
    request_id = engine.add(request("BE"))
    assert engine.step() == [], "the only chunk left the step"
    assert asked == [0], "nobody is asked once they have left"
    assert engine.stats().scheduler.layer_preemptions == 1
    assert tokens_of(engine, request_id) == expected
    assert plans[1].chunks[0].from_layer == (1 if keep else 0)
    assert not halted_rows(engine)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("every", "num_asked"), [(1, 2), (2, 1), (3, 0)])
def test_arrivals_are_asked_for_before_every_nth_layer(
    make_engine: MakeEngine, every: int, num_asked: int, keep: bool
) -> None:
    """Of three layers; the rows leave before the last safepoint."""
    quiet = make_engine(scheduler=preemptible.NAME)
    expected = tokens_of(quiet, quiet.add(request("BE")))
    options = {"keep_halted": keep, "safepoint_every": every}
    engine = make_engine(scheduler=preemptible.NAME, scheduler_options=options)
    plans: list[StepPlan] = []
    engine.on_step = lambda plan, host_works, seconds: plans.append(plan)
    asked: list[int] = []

    def arrivals() -> list[Arrival]:
        asked.append(len(plans))
        return [Arrival(request("LS"))] if asked == [0] * num_asked else []

    watch(engine, arrivals)
    request_id = engine.add(request("BE"))
    first = engine.step()
    assert asked == [0] * num_asked and bool(first) is (num_asked == 0)
    assert engine.stats().scheduler.layer_preemptions == (num_asked > 0)
    tokens = [token for output in first for token in output.new_token_ids]
    assert tokens + tokens_of(engine, request_id) == expected
    assert plans[1].chunks[0].from_layer == (2 if keep and num_asked else 0)


def test_ls_rows_stay_and_finish_their_step(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler=preemptible.NAME)
    expected = tokens_of(engine, engine.add(request("LS")))
    watch(engine, lambda: [Arrival(request("LS"))])
    both = [engine.add(request("LS")), engine.add(request("BE"))]
    outputs = {output.request_id: output.new_token_ids for output in engine.step()}
    assert outputs == {both[0]: (expected[0],)}


@pytest.mark.parametrize("service_class", ["BE", "of no such class"])
def test_what_is_not_latency_sensitive_preempts_nobody(make_engine: MakeEngine, service_class: str) -> None:
    engine = make_engine(scheduler=preemptible.NAME)
    watch(engine, lambda: [Arrival(request(service_class))])
    engine.add(request("BE"))
    engine.step()
    assert engine.stats().scheduler.layer_preemptions == 0


def test_what_an_aborted_request_left_is_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler=preemptible.NAME)
    watch(engine, lambda: [Arrival(request("LS"))])
    request_id = engine.add(request("BE"))
    engine.step()
    assert halted_rows(engine)
    engine.abort(request_id)
    assert not halted_rows(engine)


@pytest.mark.parametrize("scheduler", ["sarathi", "omniserve"])
def test_policies_without_safepoints_take_no_arrivals(make_engine: MakeEngine, scheduler: str) -> None:
    assert make_engine(scheduler=scheduler).preemption is None

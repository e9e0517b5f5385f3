"""Best-effort rows leave a step between layers: what the engine does with them, and when it asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omniserve import Engine, Request, SamplingParams
from omniserve.core.plan import StepPlan
from tests.sched import preemptible

MakeEngine = Callable[..., Engine]


def request(service_class: str, length: int = 24, output: int = 4) -> Request:
    return Request(
        prompt_token_ids=list(range(1, length + 1)),
        sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        service_class=service_class,
    )


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

    def on_safepoint() -> None:
        asked.append(len(plans))
        if len(plans) == 0:  # in the first step, before its second layer
            engine.arriving(request("LS"))

    engine.on_safepoint = on_safepoint
    request_id = engine.add(request("BE"))
    assert engine.step() == [], "the only chunk left the step"
    assert asked == [0], "nobody is asked once they have left"
    assert engine.stats().layer_preemptions == 1
    assert tokens_of(engine, request_id) == expected
    assert plans[1].chunks[0].from_layer == (1 if keep else 0)
    assert not engine.runner.halted.rows


def test_ls_rows_stay_and_finish_their_step(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler=preemptible.NAME)
    expected = tokens_of(engine, engine.add(request("LS")))
    engine.on_safepoint = lambda: engine.arriving(request("LS"))
    both = [engine.add(request("LS")), engine.add(request("BE"))]
    outputs = {output.request_id: output.new_token_ids for output in engine.step()}
    assert outputs == {both[0]: (expected[0],)}


def test_a_signal_that_came_too_late_does_not_hit_the_next_step(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler=preemptible.NAME)
    engine.add(request("BE"))
    engine.step()
    engine.arriving(request("LS"))  # between two steps: the next one knows of it
    engine.step()
    assert engine.stats().layer_preemptions == 0


def test_a_best_effort_arrival_preempts_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler=preemptible.NAME)
    engine.on_safepoint = lambda: engine.arriving(request("BE"))
    engine.add(request("BE"))
    engine.step()
    assert engine.stats().layer_preemptions == 0


def test_what_an_aborted_request_left_is_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler=preemptible.NAME)
    engine.on_safepoint = lambda: engine.arriving(request("LS"))
    request_id = engine.add(request("BE"))
    engine.step()
    assert engine.runner.halted.rows
    engine.abort(request_id)
    assert not engine.runner.halted.rows


@pytest.mark.parametrize("scheduler", ["sarathi", "omniserve"])
def test_policies_without_safepoints_are_never_asked(make_engine: MakeEngine, scheduler: str) -> None:
    engine = make_engine(scheduler=scheduler)
    engine.on_safepoint = lambda: pytest.fail("asked")
    engine.generate([request("BE"), request("LS")])

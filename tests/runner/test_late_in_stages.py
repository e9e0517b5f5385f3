"""Late joins in a stage: which seats are empty there, and what the stages behind are told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omniserve.core.plan import PiggybackJoin, StepPlan
from omniserve.core.work import AttentionResult, HostEvent
from omniserve.host.arrived_results import ArrivedResults, StageEvents
from omniserve.ops import collectives
from omniserve.runner.late_in_stages import StagedLateStep, StageResults
from omniserve.runner.late_results import ResultCheck
from omniserve.runner.layer_loop import HeldEvents
from omniserve.runner.step_inputs import LayersOutput, SampledRows, make_step_inputs

NOTHING = SampledRows(torch.empty(0, dtype=torch.int64), (), ())


def join(name: str, layer: int, *, is_ready: bool = False) -> PiggybackJoin:
    return PiggybackJoin(request_id=name, position=7, slot=ord(name) - 97, epoch=2, layer=layer, is_ready=is_ready)


def result(name: str, layer: int, *, ok: bool = True, epoch: int = 2) -> AttentionResult:
    return AttentionResult(slot=ord(name) - 97, epoch=epoch, layer=layer, position=7, ok=ok)


class Link:
    """A stage of several, which is told these flags."""

    def __init__(self, told: Sequence[bool], *, is_last: bool) -> None:
        self.told, self.is_last, self.sent = told, is_last, list[list[bool]]()

    def receive_flags(self, count: int) -> list[bool]:
        assert count == len(self.told)
        return list(self.told)

    def send_flags(self, flags: Sequence[bool]) -> None:
        self.sent.append(list(flags))


class Came(ResultCheck):
    def __init__(self, *names: str) -> None:
        self.names = names

    def settle(self, joins: Sequence[PiggybackJoin], *, as_one: bool) -> list[bool]:
        return [each.is_ready or each.request_id in self.names for each in joins]


def begun(plan: StepPlan, layers: range, link: Link, *came: str) -> tuple[StagedLateStep, Any]:
    """Return the hooks of a stage, and the step as it comes to the stage's first layer."""
    model = SimpleNamespace(layers=layers)
    sampled = lambda run: NOTHING  # noqa: E731
    loop: Any = SimpleNamespace(link=link, model=model, rows=SimpleNamespace(device_looks=False), sampled=sampled)
    inputs = make_step_inputs(plan, block_size=4, num_layers=4, device=torch.device("cpu"))
    run: Any = SimpleNamespace(plan=plan, inputs=inputs, absent=set(), joining=None)
    step = StagedLateStep(loop, Came(*came), plan)
    step.begin(run)
    return step, run


def rows(seats: Any) -> list[int] | None:
    return seats if seats is None else seats.rows_P.tolist()


JOINS = (join("a", 1), join("b", 1), join("c", 2), join("d", 2, is_ready=True), join("e", 0))
PLAN = StepPlan(step_id=0, joins=JOINS, num_piggyback_seats=2)


def test_a_stage_tells_the_next_one_which_joins_up_to_its_last_layer_have_missed_the_step() -> None:
    link = Link((), is_last=False)
    step, run = begun(PLAN, range(2), link, "b", "e")
    assert rows(run.joining(run, 0)) == [4, -1] and rows(run.joining(run, 1)) == [-1, 1]
    output = LayersOutput(torch.zeros(2, 1), NOTHING)
    assert step.finish(run, output) is output and link.sent == [[False, True, False]]


def test_rows_that_missed_at_the_last_layer_of_the_stage_before_are_not_sent_to_the_host_tier() -> None:
    step, run = begun(PLAN, range(2, 4), Link((False, True, False), is_last=True))
    assert rows(run.inputs.leaving(2)) == [-1, 1] and run.inputs.leaving(2).slots_P.tolist() == [-1, 1]
    assert rows(run.joining(run, 2)) == [-1, 3], "the late one of this stage has not come"
    output = step.finish(run, LayersOutput(torch.zeros(2, 1), NOTHING))
    assert output.outcome.missed == {"a", "c"}


def test_if_all_have_missed_there_nothing_is_sent() -> None:
    _, run = begun(PLAN, range(2, 4), Link((False, True, True), is_last=True), "c")
    assert run.inputs.leaving(2) is None and run.absent == {"a", "b"}
    assert rows(run.joining(run, 2)) == [2, 3]


def test_a_stage_in_between_passes_on_what_it_was_told() -> None:
    link = Link((False, True), is_last=False)
    plan = StepPlan(step_id=0, joins=(join("e", 0), join("a", 0), join("c", 1), join("b", 2)), num_piggyback_seats=2)
    step, run = begun(plan, range(1, 2), link, "c")
    run.joining(run, 1)
    step.finish(run, LayersOutput(torch.zeros(2, 1), NOTHING))
    names = [each for _, each in sorted((j.layer, j.request_id) for j in plan.joins)][:3]
    assert names == ["a", "e", "c"] and link.sent == [[False, True, False]]


def test_the_newest_result_of_a_slot_is_there_if_it_is_right_and_has_not_failed() -> None:
    arrived = ArrivedResults()
    arrived.note([result("a", 0), result("a", 1), result("b", 1, ok=False), result("c", 1, epoch=1)])
    assert [arrived.has(join(name, 1)) for name in "abc"] == [True, False, False]
    assert not arrived.has(join("a", 0))


def test_events_that_a_step_comes_upon_are_held_for_the_scheduler() -> None:
    arrived, held, news = ArrivedResults(), HeldEvents(), [result("a", 1)]

    def poll() -> list[HostEvent]:
        arrived.note(news)
        return [*news]

    results = StageResults(StageEvents(arrived, poll), held)
    joins = [join("a", 1), join("b", 1), join("d", 1, is_ready=True)]
    assert results.settle(joins, as_one=False) == [True, False, True]
    assert results.settle(joins, as_one=True) == [False, False, False]
    assert held.take() == [*news, *news]


def test_a_result_is_there_if_all_ranks_of_the_stage_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others:
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([1.0, 1.0, 0.0])

    monkeypatch.setattr(collectives._ranks, "group", Others())
    monkeypatch.setattr(collectives._ranks, "size", 2)
    arrived = ArrivedResults()
    arrived.note([result("a", 1), result("c", 1)])
    results = StageResults(StageEvents(arrived, lambda: []), HeldEvents())
    assert results.settle([join(name, 1) for name in "abc"], as_one=False) == [True, False, False]

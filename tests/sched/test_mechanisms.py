"""Mechanisms of policies that an option switches off: each does something, and nothing is left of it without."""

from __future__ import annotations

import random
from typing import Any

import pytest

from omniserve.core.plan import StepPlan
from omniserve.latency import CorrectedModel, HostSpeed
from omniserve.sched import SCHEDULERS, bros
from omniserve.sched.apex import HostWatch
from omniserve.sched.step_cost import Headrooms
from tests.sched.histories import History, Options
from tests.sched.predictor import forecast

WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "headrooms": ("omniserve", {}),
    "newcomer_bound": ("omniserve", {}),
    "seat_objective": ("omniserve", {"is_crowded": True}),
    "partial_progress_first": ("apex", {"is_crowded": True}),
    "best_step_size": ("conserve", {}),
    "replace_ls": ("bros", {}),
    "adapt_batch": ("bros", {}),
}
"""A policy with each mechanism, and what its histories need for it to have something to do."""
_MOST_HISTORIES = 60


@pytest.mark.parametrize("name", WHERE)
def test_a_mechanism_that_is_off_makes_other_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, more = WHERE[name]
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    options = Options(has_forecast=True, **more)
    for seed in range(_MOST_HISTORIES):
        made = []
        for is_on in (True, False):
            monkeypatch.setattr("tests.sched.histories._without_some", lambda rng, is_on=is_on: {name: is_on})
            made.append(_steps(History(scheduler, seed, "tiered", options)))
        if made[0] != made[1]:
            return
    raise AssertionError(f"{name} changed no plan of {_MOST_HISTORIES} histories")


def _steps(history: History) -> list[str]:
    """Run a history; return its plans in words."""
    plans: list[str] = []
    schedule = history.sched.schedule

    def noted(now_s: float) -> StepPlan:
        plan = schedule(now_s)
        plans.append(repr(plan))
        return plan

    history.sched.schedule = noted  # type: ignore[method-assign]
    history.run([])
    return plans


def test_rows_of_conserve_leave_no_step_without_layer_preemption() -> None:
    options = SCHEDULERS.get("conserve").options_type
    assert options().preempts and not options(layer_preemption=False).preempts


def test_a_watch_that_does_not_follow_keeps_the_profiles_word() -> None:
    speed = HostSpeed(per_key_s=1e-6, per_request_s=0.0, per_call_s=0.0, threads=1)
    for follows, factor in ((True, 1.05), (False, 1.0)):
        watch = HostWatch(speed, follows=follows)
        watch.tick(0.0, is_busy=True)
        watch.note(10, 1000)
        watch.tick(0.002, is_busy=True)  # twice what the profile says
        assert watch.factor == pytest.approx(factor)


def test_a_model_that_is_not_corrected_stays_and_tells_its_error() -> None:
    rng = random.Random(0)
    for learns in (True, False):
        made_up = forecast(3, base=1.0, row=0.1, key=0.001, shared=1.0, host_key=0.001)
        model = CorrectedModel(made_up.predictor, learns=learns)
        step = made_up.step()
        step.add_chunk(0, 10, samples=1)
        before = model.step_s(step.features)
        now_s = 0.0
        for _ in range(50):
            seconds = before * rng.uniform(1.9, 2.1)
            now_s += seconds
            model.observe(step.features, seconds, now_s)
        after = model.step_s(step.features)
        assert after > 1.5 * before if learns else after == before
        assert model.drift == pytest.approx(2.0, rel=0.05)
        assert (model.error > 0.4) is not learns


def test_headrooms_are_the_usual_ones_or_none() -> None:
    assert Headrooms.of(are_left=True) == Headrooms()
    assert Headrooms.of(are_left=False) == Headrooms(0.0, 0.0, 0.0)

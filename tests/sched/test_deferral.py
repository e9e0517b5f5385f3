"""``omniserve`` with ``defer_classes``: who leaves a step for whom, and when it goes on (omniserve 6)."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Set

import pytest

from omniserve.core.plan import Bound, StepPlan
from omniserve.core.request import SLO, Request, SamplingParams
from tests.sched.benches import Clock, class_of
from tests.sched.preemptible import CLASSES


class _HaltsBeforeLayer1(random.Random):
    """Draws that let a FakeDevice ask before layer 1, in every step, who must leave it."""

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        return 1

    def random(self) -> float:
        return 0.5


class Bench(Clock):
    """A clock on which requests come in the middle of a step."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"classes": CLASSES, "defer_classes": True, "max_num_batched_tokens": 4096} | settings)
        self.device.rng, self.device.halt_rate = _HaltsBeforeLayer1(), 1.0
        self.halted: dict[str, int] = {}

    def step_with_arrival(
        self, name: str, *, after_s: float, prompt: int = 20, ttft: float | None = 0.2, tpot: float | None = None
    ) -> Set[str]:
        """Run a step in which a request comes; return which rows were asked to leave."""
        asked: set[str] = set()

        def must_leave() -> Set[str]:
            request = Request(
                prompt_token_ids=[7] * prompt, sampling=SamplingParams(max_tokens=100), service_class=class_of(name)
            )
            asked.update(
                self.scheduler.policy.to_preempt(request, SLO(ttft_s=ttft, tpot_s=tpot), 0.0, self.now_s + after_s)
            )
            return asked

        self.device.must_leave = must_leave
        self.step()
        self.device.must_leave = frozenset
        self.add(name, prompt=prompt, ttft=ttft, tpot=tpot)
        return asked

    def step(self) -> StepPlan:
        if self.device.must_leave is None:
            self.device.must_leave = frozenset
        return super().step()


def chunks(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """Return the number of tokens of each chunk, and its first layer."""
    return {chunk.request_id: (len(chunk.token_ids), chunk.from_layer) for chunk in plan.chunks}


@pytest.mark.parametrize("name", ["silver", "be"])
def test_a_lower_class_leaves_for_a_request_that_would_be_late_and_goes_on_at_its_layer(name: str) -> None:
    bench = Bench(admission=False)
    bench.add(name, prompt=300, ttft=5.0 if name == "silver" else None)
    assert bench.step_with_arrival("gold", after_s=0.01) == {name}
    plan = bench.step()
    assert chunks(plan)["gold"] == (20, 0)
    while name not in chunks(plan):
        plan = bench.step()
    # The step's bound has no time for all of a best-effort chunk, which begins anew.
    assert chunks(plan)[name] == (300, 1) or (name == "be" and chunks(plan)[name][1] == 0)


@pytest.mark.parametrize(
    ("first", "objectives", "coming", "ttft"),
    [
        ("silver", {"ttft": 5.0}, "silver2", 0.2),  # not a higher class
        ("silver", {"ttft": 5.0}, "bronze", 0.2),
        ("gold", {"ttft": 5.0}, "gold2", 0.2),
        ("silver", {}, "gold", 0.2),  # nothing says how long it may wait
        ("silver", {"ttft": 0.95}, "gold", 0.2),  # it would be late itself
        ("silver", {"ttft": 5.0}, "gold", 5.0),  # it is in time all the same
        ("silver", {"ttft": 5.0}, "gold", 0.01),  # it is late all the same
        ("silver", {"ttft": 5.0}, "gold", None),
    ],
)
def test_nobody_leaves(first: str, objectives: dict[str, float], coming: str, ttft: float | None) -> None:
    bench = Bench(admission=False)
    bench.add(first, prompt=300, **objectives)  # type: ignore[arg-type]
    assert bench.step_with_arrival(coming, after_s=0.01, ttft=ttft) == set()


def test_a_row_leaves_though_a_long_prompt_waits_that_lets_short_ones_pass() -> None:
    classes = (dataclasses.replace(CLASSES[0], slo=SLO(ttft_s=0.05)), *CLASSES[1:])
    bench = Bench(admission=False, classes=classes, device_blocks=100, max_num_batched_tokens=100)
    bench.add("silver", prompt=300, ttft=5.0)
    bench.step()
    bench.add("gold-long", prompt=250, ttft=0.05, by_default=True)
    assert bench.requests.states["gold-long"].has_scaled_ttft
    assert bench.step_with_arrival("gold", after_s=0.01) == {"silver"}


def test_without_the_option_no_row_may_leave() -> None:
    bench = Bench(defer_classes=False)
    bench.add("silver", prompt=300, ttft=5.0)
    assert bench.step().preemptible == frozenset()


def test_a_decode_leaves_only_as_long_as_it_has_lead() -> None:
    bench = Bench(admission=False)
    for i in range(40):
        bench.add(f"silver{i}", prompt=4, ttft=5.0, tpot=0.3 if i % 2 else 0.06)
    bench.run_until(lambda: len(bench.first_s) == 40)
    asked = bench.step_with_arrival("gold", after_s=0.001, prompt=20, ttft=0.15)
    assert asked == {f"silver{i}" for i in range(1, 40, 2)}


def test_deferred_decodes_wait_for_a_higher_class_while_they_have_slack() -> None:
    """The prompt is late beside their decodes, which join the step behind it: their TPOT can bear that."""
    bench = Bench(admission=False, predict={"key": 0.0})
    for i in range(60):
        bench.add(f"silver{i}", prompt=4, ttft=5.0, tpot=0.3)
    bench.run_until(lambda: len(bench.first_s) == 60)
    assert len(bench.step_with_arrival("gold", after_s=0.001, prompt=40, ttft=0.1)) == 60
    plan = bench.step()
    assert chunks(plan) == {"gold": (40, 0)}
    assert plan.decision is not None
    assert [(out.work, out.num_requests) for out in plan.decision.left_out if out.bound is Bound.DEFERRED] == [
        ("LS deferred", 60)
    ]
    assert chunks(bench.step()) == {"gold": (1, 0)} | {f"silver{i}": (1, 1) for i in range(60)}
    gaps_s = [later - earlier for times in bench.token_s.values() for earlier, later in itertools.pairwise(times)]
    assert max(gaps_s) <= 0.3


def test_what_was_deferred_goes_on_if_the_higher_class_has_no_memory() -> None:
    bench = Bench(admission=False, device_blocks=80, predict={"key": 0.0})
    for i in range(15):
        bench.add(f"silver{i}", prompt=4, ttft=5.0, tpot=1.0)
    bench.run_until(lambda: len(bench.first_s) == 15)
    bench.step_with_arrival("gold", after_s=0.001, prompt=300, ttft=0.3925)
    silver = {f"silver{i}" for i in range(15)}
    assert bench.scheduler.policy.step.deferral.waiting(bench.now_s) == silver  # type: ignore[attr-defined]
    assert chunks(bench.step()) == dict.fromkeys(silver, (1, 1))

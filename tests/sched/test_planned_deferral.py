"""``omniserve`` with ``defer_tokens``: the layers at which rows of lower classes leave a step (omniserve 6)."""

from __future__ import annotations

import itertools

import pytest

from omniserve.core.plan import StepPlan
from omniserve.sched.options import APEXOptions, CoServingOptions
from tests.sched.benches import Clock
from tests.sched.preemptible import CLASSES

NUM_LAYERS = 8


class Bench(Clock):
    """A clock with steps of 5 ms and 1 ms a row, on which 60 decodes of SILVER and one of GOLD can run."""

    def __init__(self, mode: str, **settings: object) -> None:
        super().__init__(**{
            "classes": CLASSES, "defer_tokens": mode, "slack": "step", "max_num_batched_tokens": 4096,
            "num_layers": NUM_LAYERS, "admission": False, "predict": {"key": 0.0, "sample": 0.0},
        } | settings)  # fmt: skip

    def with_decodes(
        self, *, silver: int = 60, gold_tpot: float | None = 0.03, silver_tpot: float | None = 0.3
    ) -> Bench:
        """Return it once all of these decode; the next step is the first in which GOLD does."""
        for number in range(silver):
            self.add(f"silver{number}", prompt=4, ttft=5.0, tpot=silver_tpot)
        self.run_until(lambda: sum(name.startswith("silver") for name in self.first_s) == silver)
        self.add("gold", prompt=4, ttft=5.0, tpot=gold_tpot)
        self.run_until(lambda: "gold" in self.first_s)
        return self


def leaving(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: chunk.leaves_at for chunk in plan.chunks if chunk.leaves_at}


def test_no_more_rows_leave_than_the_higher_class_needs() -> None:
    # 66 ms with all rows, of which the TPOT bears 29.1. The others' next tokens are due in four such steps, so they
    # pass a quarter of their layers in this one: n of 60 leave for 6 + (60 - n) + n / 4 <= 29.1.
    bench = Bench("late").with_decodes()
    plan = bench.step()
    left = leaving(plan)
    assert set(left) == {f"silver{number}" for number in range(60 - 50, 60)}, "the youngest"
    assert set(left.values()) == {NUM_LAYERS // 4}
    assert plan.decision is not None and plan.decision.predicted_s == pytest.approx(0.006 + 0.010 + 0.0125)


def test_rows_that_left_go_on_at_their_layer_and_their_tokens_are_in_time() -> None:
    bench = Bench("late").with_decodes()
    plans = [bench.step() for _ in range(40)]
    assert any(chunk.from_layer for plan in plans for chunk in plan.chunks)
    for before, after in itertools.pairwise(plans):
        left = leaving(before)
        assert {c.request_id: c.from_layer for c in after.chunks if c.from_layer} == {
            request_id: layer for request_id, layer in left.items() if bench.scheduler.requests.states.get(request_id)
        }
    for name, times in bench.token_s.items():
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) <= 0.3, name
    assert len(bench.token_s["silver0"]) > 5


def test_no_row_leaves_a_step_that_is_short_enough() -> None:
    assert not leaving(Bench("late").with_decodes(silver=20).step())
    assert not leaving(Bench("late").with_decodes(gold_tpot=None).step())
    assert not leaving(Bench("off").with_decodes().step())


def test_all_rows_of_lower_classes_leave_with_always() -> None:
    # A step of 26 ms is within the TPOT. They could wait for 10 such steps, as long as the TPOT each.
    plan = Bench("always").with_decodes(silver=20).step()
    assert leaving(plan) == {f"silver{number}": 1 for number in range(20)}
    assert not leaving(Bench("always").with_decodes(silver=20, gold_tpot=None).step()), "no token is to come sooner"


def test_a_token_is_spread_over_no_more_steps_than_it_has_time_for() -> None:
    for silver_tpot, layers in ((0.3, 1), (0.1, 3), (0.05, 8)):
        left = leaving(Bench("always").with_decodes(silver=20, silver_tpot=silver_tpot).step())
        assert set(left.values()) == ({layers} if layers < NUM_LAYERS else set())
    left = leaving(Bench("always", most_token_steps=2).with_decodes(silver=20).step())
    assert set(left.values()) == {4}


def test_a_decode_without_an_objective_stays() -> None:
    assert not leaving(Bench("always").with_decodes(silver_tpot=None).step())


def test_rows_of_a_lower_class_leave_before_those_of_a_middle_one() -> None:
    bench = Bench("late")
    for number in range(15):
        bench.add(f"bronze{number}", prompt=4, ttft=5.0, tpot=0.3)
        bench.add(f"silver{number}", prompt=4, ttft=5.0, tpot=0.3)
    bench.run_until(lambda: len(bench.first_s) == 30)
    bench.add("gold", prompt=4, ttft=5.0, tpot=0.03)
    bench.run_until(lambda: "gold" in bench.first_s)
    assert {name[:6] for name in leaving(bench.step())} == {"bronze"}


def test_best_effort_rows_leave_beside_decodes_with_an_objective_only() -> None:
    bench = Bench("always", most_token_steps=4)
    for number in range(3):
        bench.add(f"be{number}", prompt=4, output=20)
    assert not leaving(bench.step()) and not leaving(bench.step())
    bench.add("gold", prompt=4, ttft=5.0, tpot=0.05, output=30)
    bench.run_until(lambda: "gold" in bench.first_s)
    plans = [bench.step() for _ in range(12)]
    assert leaving(plans[0]) == {f"be{number}": 2 for number in range(3)}
    assert leaving(plans[1]) == {f"be{number}": 4 for number in range(3)}
    assert leaving(plans[3]) == {}, "the last quarter of their layers"
    assert len(bench.token_s["be0"]) >= 4
    bench = Bench("late")
    bench.add("be", prompt=4)
    bench.add("gold", prompt=4, ttft=5.0, tpot=0.03)
    bench.run_until(lambda: "gold" in bench.first_s)
    assert not leaving(bench.step())


def test_a_step_that_rows_leave_has_time_for_best_effort_work() -> None:
    # Where a step counts the rows that it has a quarter of the time as a quarter, 18 ms of 27 are left for prompts.
    with_them, without = (Bench(mode).with_decodes(silver=24) for mode in ("always", "off"))
    tokens = []
    for bench in (with_them, without):
        bench.add("be", prompt=300)
        plan = bench.step()
        tokens.append(sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.request_id == "be"))
    assert tokens[0] > 15 and tokens[1] == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="defer_tokens must be off, late or always, got 'on'"):
        CoServingOptions(defer_tokens="on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="most_token_steps must be >= 1, got 0"):
        CoServingOptions(most_token_steps=0)
    with pytest.raises(ValueError, match="hybrid_first_batch and defer_tokens exclude each other"):
        APEXOptions(hybrid_first_batch=True, defer_tokens="late")

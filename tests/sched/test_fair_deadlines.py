"""Tenants and deadlines together: shares are kept, each tenant's deadlines in order and in time, nothing starves."""

from __future__ import annotations

import random

import pytest

from omniserve.core.errors import RequestRejected
from omniserve.core.request import SLO, ClassSpec
from omniserve.core.stats import EngineStats, SchedulerStats, TenantStats, total
from omniserve.sched.fairness import ClassAccounts
from omniserve.sched.state import BE
from tests.rotation import rotating
from tests.sched.benches import Bench, Clock
from tests.sched.test_fairness import WEIGHTS, Flood, machine_of

CLASSES = (ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=1.0)), ClassSpec(name="BE", kind="BE"))


class DueFlood(Flood):
    """A flood in which some tenants' requests have deadlines, of which each keeps a few unfinished."""

    def __init__(self, machine: Clock, rng: random.Random) -> None:
        super().__init__(machine, rng)
        self.most_due = dict(zip(WEIGHTS, rng.sample([0, 1, 3], 3), strict=True))
        self.due_s: dict[str, float] = {}
        self.num_refused = 0

    def refill(self) -> None:
        unfinished = self.machine.requests.states
        for tenant, most in self.most_due.items():
            due = sum(name in self.due_s for name, state in unfinished.items() if state.request.tenant == tenant)
            for _ in range(most - due):
                name, deadline = f"be-due{len(self.due_s) + self.num_refused}", self.rng.uniform(10.0, 60.0)
                prompt, output = self.sizes[tenant]
                try:
                    self.machine.add(
                        name, prompt=prompt, output=output, deadline=deadline, tenant=tenant, weight=WEIGHTS[tenant]
                    )
                except RequestRejected:
                    self.num_refused += 1
                else:
                    self.due_s[name] = self.machine.now_s + deadline
        super().refill()


class Order:
    """Checks after each step that requests of a tenant began in the order of their deadlines and arrivals."""

    def __init__(self, machine: Clock) -> None:
        self._step, self._machine = machine.step, machine
        machine.step = self.step  # type: ignore[method-assign]
        self.num_begun = 0

    def step(self):  # type: ignore[no-untyped-def]
        new = [state for state in self._machine.requests.waiting[BE].everyone() if state.first_scheduled_s is None]
        result = self._step()
        waiting = {state.account: state for state in reversed(new) if not state.has_kv}  # the first of each tenant
        begun = [state for state in new if state.has_kv]
        for state in begun:
            first = waiting.get(state.account)
            assert first is None or first.priority_key > state.priority_key, (state.request_id, first.request_id)
        self.num_begun += len(begun)
        return result


@pytest.mark.parametrize("seed", rotating(range(24), 1))
def test_tenants_share_by_weight_and_keep_their_deadlines(seed: int) -> None:
    machine, rng = machine_of(seed, "omniserve")
    flood, order = DueFlood(machine, rng), Order(machine)
    flood.run(10.0)
    assert flood.run(60.0) == pytest.approx(dict.fromkeys(WEIGHTS, 1.0), abs=0.1)
    unfinished = [*machine.requests.states]
    machine.run_until(lambda: machine.finished.issuperset(unfinished), most=20_000)
    late = {name: machine.token_s[name][-1] - at_s for name, at_s in flood.due_s.items()}
    assert max(late.values()) <= 0, (late, flood.num_refused)
    assert len(late) > 5 and order.num_begun > 50


def test_a_deadline_at_stake_goes_before_the_turn_of_another_tenant_and_one_far_away_does_not() -> None:
    machine = Clock(device_blocks=2000, max_num_batched_tokens=64)
    for number in range(100):
        machine.add(f"be-a{number}", prompt=60, output=2, tenant="a")
        machine.add(f"be-b{number}", prompt=60, output=2, tenant="b")
    machine.run_until(lambda: len(machine.finished) > 10)
    for number in range(20):
        machine.add(f"be-far{number}", prompt=60, output=2, tenant="a", deadline=1000.0)
    had = len(machine.finished)
    machine.run_until(lambda: machine.finished.issuperset(f"be-far{number}" for number in range(20)))
    others = [name for name in [*machine.first_s][had:] if name.startswith("be-b")]
    assert 15 <= len(others) <= 25
    machine.add("be-near", prompt=60, output=2, tenant="a", deadline=0.5)
    begun_s = machine.now_s
    machine.run_until(lambda: "be-near" in machine.finished)
    assert machine.now_s - begun_s <= 0.5


def test_a_missed_deadline_is_no_precedence_before_other_tenants() -> None:
    bench = Bench("omniserve", device_blocks=400, max_num_batched_tokens=16, max_num_seqs=8)
    for number in range(100):
        bench.add(f"be-late{number}", prompt=16, output=1, tenant="a", deadline=1e-6)
        bench.add(f"be-b{number}", prompt=16, output=1, tenant="b")
    bench.run_until(lambda: len(bench.finished) > 40)
    assert sum("late" in name for name in bench.finished) < 25


def test_a_made_up_request_finds_the_account_as_a_real_one_would() -> None:
    of_class = ClassAccounts()
    busy = of_class.of("a", 1.0)
    busy.enter([])
    busy.admit(100)
    found = of_class.at_entry("", [busy])
    assert found.virtual_time == 100.0 and [*of_class] == [busy]
    real = of_class.of("", 1.0)
    real.enter([busy])
    assert real.virtual_time == 100.0
    assert of_class.at_entry("", [busy, real]) is real


def test_what_is_admittable_is_not_lowered_by_what_another_tenant_has_queued() -> None:
    def rate(tenant: str) -> float:
        clock = Clock(max_num_batched_tokens=64, max_num_seqs=64, predict={"base": 5.0, "row": 1.0}, classes=CLASSES)
        for number in range(8):
            clock.add(f"ls{number}", prompt=60, output=2, ttft=1.0, tenant=tenant)
        clock.step()
        return clock.scheduler.admittable_per_s(clock.now_s)["LS"]

    assert rate("a") > 2 * rate("")


def test_tenants_of_several_engines_are_summed_but_for_their_virtual_times() -> None:
    def engine(**tenants: TenantStats) -> EngineStats:
        return EngineStats(scheduler=SchedulerStats(tenants={"BE": tenants}))

    first = engine(a=TenantStats(waiting=1, output_tokens=5, virtual_time=10.0), b=TenantStats(virtual_time=7.0))
    both = total([first, engine(a=TenantStats(waiting=2, running=1, virtual_time=30.0)), EngineStats()])
    assert both.scheduler.tenants == {
        "BE": {
            "a": TenantStats(waiting=3, running=1, output_tokens=5, virtual_time=20.0),
            "b": TenantStats(virtual_time=7.0),
        }
    }

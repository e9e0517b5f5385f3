"""How many engines a load needs, and the number that is wanted of it, on a virtual clock."""

from __future__ import annotations

import random

import pytest

from omniserve.routing.need import Demand, Need, Wanted


def demand(offered=1.0, kept=None, admittable=1.0):
    return Demand(
        offered_per_s=offered, kept_per_s=offered if kept is None else kept, admittable_per_s=admittable
    )  # fmt: skip


def need(engines=2, pressure=0.0, **load):
    return Need.of(engines, {"LS": demand(**load)}, pressure)


def test_no_load_needs_nothing():
    assert need(offered=0.0).engines == 0.0
    assert Need.of(3, {}, 0.0).engines == 0.0


def test_what_uses_the_target_share_needs_the_engines_that_there_are():
    assert need(4, offered=7.0, admittable=3.0).engines == pytest.approx(4.0)


def test_the_need_does_not_depend_on_the_engines_that_have_it():
    """Twice the engines have twice the room: the same load needs the same number."""
    assert need(2, offered=3.0, admittable=7.0).engines == pytest.approx(need(4, offered=3.0, admittable=17.0).engines)


def test_refused_requests_need_more_engines_in_proportion():
    assert need(2, offered=20.0, kept=10.0, admittable=0.0).engines == pytest.approx(4.0 / 0.7)
    assert demand(20.0, 10.0).predicted_attainment == 0.5
    assert need(2, offered=20.0, kept=0.0, admittable=0.0).engines == pytest.approx(8.0 / 0.7), "at most four times"


def test_the_class_that_needs_most_counts():
    demands = {"a": demand(1.0, admittable=9.0), "b": demand(5.0, admittable=5.0)}
    assert Need.of(2, demands, 0.0).engines == Need.of(2, {"b": demands["b"]}, 0.0).engines


def test_batches_have_what_the_latency_sensitive_load_leaves():
    assert need(2, offered=0.0, pressure=1.0).engines == pytest.approx(2.0)
    assert need(2, offered=0.0, pressure=1.5).engines == pytest.approx(3.0)
    half = need(2, offered=5.0, admittable=5.0, pressure=3.0)
    assert half.batches == pytest.approx(1.0 + 3.0), "one engine's time is taken; the other's is too little three times"
    assert half.engines == half.batches > half.latency_sensitive
    assert need(2, offered=5.0, admittable=5.0, pressure=0.1).batches < half.latency_sensitive


class Clock:
    """An autoscaler that has the wanted engines some time after they are wanted."""

    def __init__(self, engines=1, start_s=60.0, **settings):
        self.wanted, self.engines, self.now_s, self.start_s = Wanted(**settings), engines, 0.0, start_s
        self.coming = []
        self.changes = 0

    def run(self, seconds, load):
        """Let time pass with a load, in engines; what is offered does not depend on how many there are."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            number = self.wanted.note(self.now_s, load(self.now_s) if callable(load) else load, self.engines)
            if number != (self.coming[-1][1] if self.coming else self.engines):
                self.coming.append((self.now_s + self.start_s, number))
                self.changes += 1
            while self.coming and self.coming[0][0] <= self.now_s:
                self.engines = self.coming.pop(0)[1]
        return self.engines


def test_a_load_that_stays_has_its_engines_and_keeps_them():
    clock = Clock()
    assert clock.run(200, 3.4) == 4
    assert clock.run(2000, 3.4) == 4 and clock.changes == 1


def test_a_burst_wants_nothing_and_a_pause_takes_nothing_away():
    clock = Clock(engines=3)
    clock.run(600, 2.5)
    assert clock.engines == 3
    clock.run(10, 9.0)
    clock.run(250, 0.0)
    clock.run(60, 2.5)
    assert clock.engines == 3 and clock.changes == 0


def test_a_load_that_is_over_goes_down_at_once_after_the_wait_but_never_below_the_least():
    clock = Clock(engines=8, least=2)
    assert clock.run(299, 3.2) == 8
    assert clock.run(100, 3.2) == 4
    assert clock.run(1000, 0.0) == 2


@pytest.mark.parametrize("seed", range(5))
def test_noise_about_a_number_changes_little(seed):
    rng = random.Random(seed)
    clock = Clock(engines=4)
    clock.run(3600, lambda _: 3.9 + rng.gauss(0, 0.3))
    assert clock.changes <= 1 and clock.engines in (4, 5)


def test_a_day_has_as_many_engines_as_it_needs_and_few_more():
    """The load rises and falls by half within two hours: engines are there for it but for the time that they start."""
    clock, short, paid, used = Clock(engines=4, start_s=120.0), 0, 0.0, 0.0

    def load(now_s):
        return 4.0 + 3.0 * (1 - abs((now_s % 7200) / 3600 - 1))

    for _ in range(7200):
        clock.run(1, load)
        now = load(clock.now_s)
        short += now > clock.engines + 0.4
        paid, used = paid + clock.engines, used + now
    assert short < 0.02 * 7200
    assert paid < 1.25 * used
    assert clock.changes <= 8


def test_the_waits_are_checked():
    with pytest.raises(ValueError, match="up_s"):
        Wanted(up_s=10, down_s=5)

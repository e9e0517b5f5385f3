"""The tenants of a class share it by weight."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from omniserve.core.config import LoRAConfig
from omniserve.core.errors import RequestRejected
from omniserve.core.request import INPUT_COST, OUTPUT_COST, Request
from omniserve.core.stats import TenantStats
from omniserve.sched.fairness import MOST_ACCOUNTS, Account, ClassAccounts, in_turn
from omniserve.sched.prefill_order import prefill_order
from tests.sched.benches import Bench, Clock, names

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}


class Flood:
    """Tenants whose requests never end: each keeps its own number of them unfinished, of its own sizes."""

    def __init__(self, machine: Clock, rng: random.Random, kind: str = "be") -> None:
        self.machine, self.rng, self.kind = machine, rng, kind
        self.sizes = {tenant: (rng.choice([8, 40, 100]), rng.choice([8, 30, 60])) for tenant in WEIGHTS}
        self.numbers = dict(zip(WEIGHTS, rng.sample([20, 60, 150], 3), strict=True))
        self.num_added = 0

    def refill(self) -> None:
        unfinished = Counter(state.request.tenant for state in self.machine.requests.states.values())
        for tenant, (prompt, output) in self.sizes.items():
            for _ in range(self.numbers[tenant] - unfinished[tenant]):
                self.machine.add(
                    f"{self.kind}{self.num_added}", prompt=self.rng.randint(prompt // 2, prompt),
                    output=self.rng.randint(output // 2, output), tenant=tenant, weight=WEIGHTS[tenant],
                )  # fmt: skip
                self.num_added += 1

    def run(self, seconds: float) -> dict[str, float]:
        """Run for so long; return what each tenant had, over its weight and the mean of that."""
        before, end_s = self._served(), self.machine.now_s + seconds
        while self.machine.now_s < end_s:
            self.refill()
            for _ in range(8):
                self.machine.step()
        now = self._served()
        had = {tenant: (now[tenant] - before[tenant]) / weight for tenant, weight in WEIGHTS.items()}
        mean = sum(had[tenant] * weight for tenant, weight in WEIGHTS.items()) / sum(WEIGHTS.values())
        return {tenant: share / mean for tenant, share in had.items()}

    def _served(self) -> Counter[str]:
        stats = self.machine.scheduler.stats().tenants.get(self.kind.upper(), {})
        tokens = {tenant: INPUT_COST * s.prompt_tokens + OUTPUT_COST * s.output_tokens for tenant, s in stats.items()}
        return Counter(tokens)  # type: ignore[arg-type]  # of a Counter it has only the zeros


def machine_of(seed: int, policy: str, device_blocks: int | None = None) -> tuple[Clock, random.Random]:
    rng = random.Random(seed)
    device_blocks = device_blocks or (80 if seed % 2 else 400)
    machine = Clock(
        policy=policy, device_blocks=device_blocks, host_blocks=rng.choice([0, 200]),
        max_num_batched_tokens=64, max_num_seqs=rng.choice([8, 32]), predict={"base": 100.0, "row": 1.0, "key": 0.002},
    )  # fmt: skip
    machine.checks = False
    return machine, rng


@pytest.mark.parametrize("seed", range(3))
def test_tenants_with_unequal_floods_share_best_effort_work_by_weight(seed: int) -> None:
    machine, rng = machine_of(seed, "omniserve")
    flood = Flood(machine, rng)
    flood.run(10.0)
    assert flood.run(60.0) == pytest.approx(dict.fromkeys(WEIGHTS, 1.0), abs=0.05)


def test_tenants_share_the_time_that_ls_work_leaves() -> None:
    machine, rng = machine_of(1, "omniserve", device_blocks=2000)
    for number in range(4):
        machine.add(f"ls{number}", prompt=4, output=900, tpot=0.2)
    flood = Flood(machine, rng)
    flood.run(10.0)
    assert flood.run(60.0) == pytest.approx(dict.fromkeys(WEIGHTS, 1.0), abs=0.05)
    gaps = [b - a for number in range(4) for a, b in zip(*_neighbours(machine.token_s[f"ls{number}"]), strict=True)]
    assert max(gaps) < 0.2


def _neighbours(times: list[float]) -> tuple[list[float], list[float]]:
    return times[:-1], times[1:]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["conserve", "bros", "neo", "apex", "omniserve-paper"])
@pytest.mark.parametrize("seed", range(4))
def test_with_other_policies_tenants_share_by_weight(policy: str, seed: int) -> None:
    machine, rng = machine_of(seed, policy)
    flood = Flood(machine, rng)
    flood.run(20.0)
    assert flood.run(60.0) == pytest.approx(dict.fromkeys(WEIGHTS, 1.0), abs=0.05)


@pytest.mark.parametrize(("policy", "kind"), [("omniserve", "be"), ("omniserve", "ls"), ("sarathi", "be")])
def test_a_single_request_passes_thousands_of_another_tenant(kind: str, policy: str) -> None:
    bench = Bench(policy, device_blocks=200, max_num_batched_tokens=32, max_num_seqs=8)
    for number in range(4000):
        bench.add(f"{kind}{number}", prompt=16, output=4, tenant="a")
    bench.checks = False
    for _ in range(5):
        bench.step()
    bench.add(f"{kind}-b", prompt=16, output=4, tenant="b")
    bench.run_until(lambda: f"{kind}-b" in bench.finished, most=12)


def test_a_tenant_whose_request_waits_for_its_adapter_keeps_its_turn() -> None:
    bench = Bench(
        "omniserve", device_blocks=400, max_num_batched_tokens=16, max_num_seqs=8, lora=LoRAConfig(max_loras=1)
    )
    for number in range(100):
        bench.add(f"be-a{number}", prompt=16, output=1, tenant="a")
    bench.add("be-b0", prompt=16, output=1, tenant="b", lora="adapter")
    begun = bench.requests.states["be-b0"].account.virtual_time
    for _ in range(30):
        bench.step(host_chance=0.0)  # the adapter is being read
    bench.add("be-b1", prompt=16, output=1, tenant="b", lora="adapter")
    assert bench.requests.states["be-b1"].account.virtual_time == begun
    for _ in range(6):
        bench.step()
    assert {"be-b0", "be-b1"} <= bench.finished


def test_a_new_tenant_is_not_given_what_it_never_asked_for() -> None:
    bench = Bench("omniserve", device_blocks=400, max_num_batched_tokens=16, max_num_seqs=8)
    for number in range(100):
        bench.add(f"be-a{number}", prompt=16, output=1, tenant="a")
    for _ in range(40):
        bench.step()
    for number in range(100):
        bench.add(f"be-b{number}", prompt=16, output=1, tenant="b")
    plans = [names(bench.step()[0]) for _ in range(40)]
    of_b = sum(name.startswith("be-b") for plan in plans for name in plan)
    assert of_b == pytest.approx(sum(map(len, plans)) / 2, abs=2)


def test_a_tenant_that_was_away_comes_back_where_the_others_are() -> None:
    bench = Bench("omniserve", device_blocks=400, max_num_batched_tokens=16, max_num_seqs=8)
    bench.add("be-b", prompt=4, output=1, tenant="b")
    bench.run_until(lambda: "be-b" in bench.finished)
    for number in range(50):
        bench.add(f"be-a{number}", prompt=16, output=1, tenant="a")
    bench.run_until(lambda: "be-a20" in bench.finished)
    bench.add("be-b2", prompt=4, output=1, tenant="b")
    tenants = bench.scheduler.stats().tenants["BE"]
    assert tenants["b"].virtual_time == tenants["a"].virtual_time > 300


def test_a_preempted_request_pays_once() -> None:
    bench = Bench("sarathi", device_blocks=8)
    for number in range(3):
        bench.add(f"be{number}", prompt=8, output=12, tenant="ab"[number % 2])
    bench.run_until(lambda: len(bench.finished) == 3)
    assert bench.scheduler.stats().preemptions > 0
    tenants = bench.scheduler.stats().tenants["BE"]
    assert tenants["a"] == TenantStats(prompt_tokens=16, output_tokens=24, virtual_time=tenants["a"].virtual_time)
    assert tenants["b"] == TenantStats(prompt_tokens=8, output_tokens=12, virtual_time=8 + 2 * 12)


def test_tokens_of_the_prefix_cache_cost_nothing() -> None:
    bench = Bench("omniserve", device_blocks=40, num_protected=20)
    for number in range(2):
        bench.add(f"be{number}", prompt=17, output=1, tenant="a", salt="same")
        bench.run_until(lambda number=number: f"be{number}" in bench.finished)
    assert bench.scheduler.stats().tenants["BE"]["a"].prompt_tokens == 17 + 1


def test_what_gives_way_is_of_the_tenant_that_had_most() -> None:
    bench = Bench("sarathi", device_blocks=11, max_num_seqs=8)
    for number in range(3):
        bench.add(f"be-a{number}", prompt=8, output=30, tenant="a")
    for _ in range(3):
        bench.step()
    bench.add("be-b", prompt=4, output=30, tenant="b")
    bench.run_until(lambda: bench.scheduler.stats().preemptions)
    assert bench.requests.states["be-b"].has_kv and not bench.requests.states["be-a2"].has_kv


# -- a bound on waiting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 200])
@pytest.mark.parametrize("lacks", ["places", "memory", "time"])
def test_a_best_effort_request_waits_no_longer_than_the_bound(lacks: str, host_blocks: int) -> None:
    clock = Clock(
        be_max_wait_s=4.0, device_blocks=60 if lacks == "memory" else 2000, host_blocks=host_blocks,
        max_num_seqs=4 if lacks == "places" else 64, predict={"base": 20.0, "row": 5.0 if lacks == "time" else 1.0},
        be_order="prefill" if lacks == "time" else "decode",
    )  # fmt: skip
    if lacks == "time":
        clock.add("ls", prompt=4, output=900, tpot=0.08)
    for number in range(4 if lacks == "memory" else 12):
        clock.add(f"be{number}", prompt=40, output=200)
    clock.run_until(lambda: clock.now_s > 3.0)
    clock.add("be-new", prompt=40, output=3)
    clock.run_until(lambda: clock.now_s > 30.0 or not clock.requests.states, most=3000)
    gaps = []
    for request_id in ("be-new", *(f"be{number}" for number in range(4))):
        times = [3.0 if request_id == "be-new" else 0.0, *clock.token_s[request_id]]
        times += [] if request_id in clock.finished else [clock.now_s]
        gaps.append(max(b - a for a, b in zip(*_neighbours(times), strict=True)))
    assert max(gaps) < 4.0 + 1.5, gaps  # others are as late, and go before it
    if lacks == "time":
        assert max(b - a for a, b in zip(*_neighbours(clock.token_s["ls"]), strict=True)) < 0.08


def test_work_of_ls_requests_alone_is_never_put_off_for_the_bound() -> None:
    clock = Clock(be_max_wait_s=0.5, slack="step", predict={"base": 20.0, "row": 5.0})
    for number in range(4):
        clock.add(f"ls{number}", prompt=4, output=200, tpot=0.046)
    for _ in range(3):
        clock.step()
    clock.add("be", prompt=40, output=2)
    clock.run_until(lambda: clock.now_s > 5.0)
    assert not clock.token_s["be"], "LS decodes take all the time that their objectives leave"
    clock.run_until(lambda: "be" in clock.finished)
    assert clock.finished >= {f"ls{number}" for number in range(4)}


@pytest.mark.parametrize("bound_s", [0.0, -1.0])
def test_the_bound_is_positive(bound_s: float) -> None:
    with pytest.raises(ValueError, match="be_max_wait_s must be"):
        Clock(be_max_wait_s=bound_s)


# -- latency-sensitive requests ----------------------------------------------------------------------------------------


def test_the_prediction_of_an_ls_request_knows_its_place() -> None:
    clock = Clock(max_num_batched_tokens=64, max_num_seqs=64, predict={"base": 5.0, "row": 1.0})
    for number in range(10):
        clock.add(f"ls-a{number}", prompt=60, output=2, ttft=3.0, tenant="a")
    clock.step()
    last_s = clock.add("ls-a", prompt=60, output=2, ttft=3.0, tenant="a")
    other_s = clock.add("ls-b", prompt=60, output=2, ttft=3.0, tenant="b")
    assert other_s is not None and last_s is not None and other_s < last_s / 3
    clock.run_until(lambda: "ls-b" in clock.first_s)
    assert clock.first_s["ls-b"] - clock.requests.states["ls-b"].arrival_s == pytest.approx(other_s, rel=0.5)
    clock.run_until(lambda: len(clock.finished) == 12)


def test_another_tenant_is_admitted_when_a_flood_is_refused() -> None:
    clock = Clock(max_num_batched_tokens=64, max_num_seqs=64, predict={"base": 5.0, "row": 1.0})
    refused = Counter[str]()
    for number in range(20):
        try:
            clock.add(f"ls-a{number}", prompt=60, output=2, ttft=0.5, tenant="a")
        except RequestRejected:
            refused["a"] += 1
    clock.step()
    clock.add("ls-b", prompt=60, output=2, ttft=0.5, tenant="b")
    assert refused["a"] > 5
    clock.run_until(lambda: "ls-b" in clock.first_s)
    assert clock.first_s["ls-b"] < 0.5


@pytest.mark.parametrize(("seed", "end_s"), [(0, 30.0), pytest.param(1, 90.0, marks=pytest.mark.slow)])
def test_floods_of_ls_requests_share_by_weight_and_what_is_admitted_is_in_time(seed: int, end_s: float) -> None:
    rng = random.Random(seed)
    clock = Clock(device_blocks=2000, max_num_batched_tokens=64, max_num_seqs=32, predict={"base": 40.0, "row": 2.0})
    clock.checks = False
    rates, sizes = {"a": 2.0, "b": 4.0, "c": 6.0}, {"a": (100, 10), "b": (40, 40), "c": (60, 20)}
    next_s = {tenant: rng.expovariate(rate) for tenant, rate in rates.items()}
    arrivals: dict[str, float] = {}
    refused = Counter[str]()
    before: dict[str, TenantStats] = {}
    while clock.now_s < end_s:
        for tenant, (prompt, output) in sizes.items():
            while next_s[tenant] <= clock.now_s:
                name = f"ls-{tenant}{next_s[tenant]}"
                try:
                    clock.add(
                        name, prompt=rng.randint(prompt // 2, prompt), output=rng.randint(output // 2, output),
                        ttft=4.0, tpot=0.4, waited=clock.now_s - next_s[tenant], tenant=tenant, weight=WEIGHTS[tenant],
                    )  # fmt: skip
                    arrivals[name] = next_s[tenant]
                except RequestRejected:
                    refused[tenant] += 1
                next_s[tenant] += rng.expovariate(rates[tenant])
        clock.step()
        if not before and clock.now_s > end_s / 3:
            before = dict(clock.scheduler.stats().tenants["LS"])
    after = clock.scheduler.stats().tenants["LS"]
    costs = {
        tenant: INPUT_COST * (stats.prompt_tokens - before[tenant].prompt_tokens)
        + OUTPUT_COST * (stats.output_tokens - before[tenant].output_tokens)
        for tenant, stats in after.items()
    }
    # Over some twenty seconds a request more or less is some per cent.
    shares = {tenant: 4 * cost / sum(costs.values()) for tenant, cost in costs.items()}
    assert shares == pytest.approx(WEIGHTS, rel=0.1 if end_s < 60 else 0.05)
    assert all(refused[tenant] for tenant in WEIGHTS)
    known = [name for name, arrival_s in arrivals.items() if name in clock.first_s or clock.now_s - arrival_s > 4.0]
    in_time = sum(clock.first_s.get(name, 1e9) - arrivals[name] <= 4.0 for name in known)
    assert in_time >= 0.95 * len(known)


def test_long_prompts_let_short_ones_of_other_tenants_pass_until_they_are_due() -> None:
    clock = Clock(max_num_batched_tokens=512, predict={"base": 5.0, "row": 1.0})
    clock.add("ls-a", prompt=8, output=1, tenant="a")
    clock.add("ls-b", prompt=8, output=1, tenant="b")
    (first, second) = clock.requests.states.values()
    first.later_s, second.account.virtual_time = 1.0, 3.0
    assert prefill_order([first, second], 0.5) == [second, first]
    assert prefill_order([first, second], 1.5) == [first, second]


# -- the order itself --------------------------------------------------------------------------------------------------


class One:
    """A request as far as its place goes."""

    def __init__(self, rank: int, number: int, cost: float) -> None:
        self.priority_key, self.next_cost = (rank, 0.0, number), cost


def test_requests_come_by_class_and_then_by_start_tag() -> None:
    rng = random.Random(0)
    for _ in range(100):
        lanes: dict[Account, list[One]] = {}
        for rank in range(rng.randint(1, 3)):
            of_class = ClassAccounts()
            for tenant in range(rng.randint(1, 4)):
                account = of_class.of(str(tenant), rng.choice([0.5, 1.0, 3.0]))
                account.virtual_time = float(rng.randint(0, 20))
                numbers = sorted(rng.sample(range(1000), rng.randint(1, 6)))
                lanes[account] = [One(rank, 10_000 * rank + 1000 * tenant + n, rng.randint(1, 9)) for n in numbers]
        expected = []
        for account, lane in lanes.items():
            tag = account.virtual_time
            for one in lane:
                expected.append((one.priority_key[0], tag, one.priority_key))
                tag += one.next_cost / account.weight
        assert [one.priority_key for one in in_turn(lanes)] == [key for _, _, key in sorted(expected)]


def test_accounts_of_idle_tenants_are_forgotten_unless_they_are_ahead() -> None:
    of_class = ClassAccounts()
    ahead = of_class.of("ahead", 1.0)
    ahead.enter([])
    ahead.admit(100)
    ahead.leave()
    for number in range(MOST_ACCOUNTS + 10):
        account = of_class.of(str(number), 1.0)
        account.enter([])
        account.leave()
    assert len([*of_class]) < 20 and of_class.of("ahead", 1.0) is ahead


def test_accounts_are_few_however_many_tenants_send_one_request_each() -> None:
    """Each is ahead of a newcomer by its request: nothing that came later has raised the level."""
    of_class = ClassAccounts()
    for number in range(2 * MOST_ACCOUNTS):
        account = of_class.of(str(number), 1.0)
        account.enter([])
        account.admit(1 + number % 1000)
        account.leave()
    assert len([*of_class]) <= MOST_ACCOUNTS
    assert max(account.virtual_time for account in of_class) == 1000.0, "those far ahead stay so"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), 1e6])
def test_a_weight_is_a_positive_number(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be"):
        Request(prompt_token_ids=[1], weight=weight)

"""Adapters take turns in memory: each request runs in the end, whatever comes, and loads fail for theirs alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence

import pytest

from omniserve.core.config import LoRAConfig
from omniserve.core.lora import LoadLoRA, LoRA
from omniserve.core.request import SLO, Request, ServiceClass
from omniserve.core.work import Done
from omniserve.sched.fairness import ClassAccounts
from omniserve.sched.lora_slots import LoRASlots
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import Phase, RequestState
from tests.sched.benches import Bench


class Table:
    """Requests in a queue, or beside it, and loads that end when they are told to."""

    def __init__(self, num_slots: int, turn: int = 2) -> None:
        self.side_work, self.queue, self.running = SideWorkQueue(), list[RequestState](), list[RequestState]()
        self.states: list[RequestState] = []
        self.accounts = ClassAccounts()
        self.loads: list[LoadLoRA] = []
        self.slots = LoRASlots(num_slots, turn, self.side_work, release=self.release, withdraw=self.withdraw)
        self._numbers = itertools.count()

    def add(
        self, name: str, kind: ServiceClass = ServiceClass.BE, *, rank: int = 0, tenant: str = "", digest: str = ""
    ) -> RequestState:
        number = next(self._numbers)
        state = RequestState(
            request_id=f"{name}{number}", request=Request(prompt_token_ids=[1]), slo=SLO(), kind=kind,
            priority_key=(2 * (kind is ServiceClass.BE) + rank, math.inf, number),
            account=self.accounts.of(tenant, 1.0),
            arrival_s=0.0, token_ids=[1],
            lora=LoRA(name=name, folder="", digest=digest or name) if name else None,
        )  # fmt: skip
        self.states.append(state)
        if self.slots.enter(state):
            self.queue.append(state)
        else:
            state.phase = Phase.LOADING
        self.check()
        return state

    def release(self, states: Iterable[RequestState]) -> None:
        for state in states:
            state.phase = Phase.WAITING
            self.queue.append(state)

    def withdraw(self, digest: str, kinds: Sequence[ServiceClass]) -> list[RequestState]:
        found = [state for state in self.queue if state.adapter == digest and state.kind in kinds]
        for state in found:
            self.queue.remove(state)
            state.phase = Phase.LOADING
        return found

    def begin(self) -> RequestState:
        """Have the first request of the queue run."""
        state = self.queue.pop(0)
        assert state.lora is None or state.lora_slot > 0
        self.running.append(state)
        return state

    def end(self, state: RequestState) -> None:
        self.states.remove(state)
        if state.phase is Phase.LOADING:
            self.slots.forget(state)
        else:
            (self.running if state in self.running else self.queue).remove(state)
            self.slots.leave(state)
        self.check()

    def finish_loads(self, *, ok: bool = True) -> None:
        self.loads += [work for work in self.side_work.take() if isinstance(work, LoadLoRA)]
        while self.loads:
            load = self.loads.pop(0)
            self.side_work.finish(Done(move_id=load.move_id, ok=ok, message="" if ok else "gone"))
            self.check()
            self.loads += [work for work in self.side_work.take() if isinstance(work, LoadLoRA)]

    def check(self) -> None:
        self.slots.check(self.states)


def test_requests_of_adapters_in_memory_run_side_by_side():
    table = Table(2)
    table.add("a"), table.add("b"), table.add("")
    assert [state.request_id for state in table.queue] == ["2"], "nothing waits for what has no adapter"
    table.finish_loads()
    table.add("a"), table.add("b")
    assert sorted(state.request_id for state in table.queue) == ["2", "a0", "a3", "b1", "b4"]
    assert table.slots.in_memory() == ["a", "b"] and not table.slots.is_loading
    slots = {state.lora.name: state.lora_slot for state in table.queue if state.lora is not None}
    assert sorted(slots.values()) == [1, 2]


def test_the_least_recently_used_adapter_leaves():
    table = Table(2)
    for name in "abab":
        table.add(name)
        table.finish_loads()
        table.end(table.begin())
    table.add("a")
    table.end(table.begin())
    table.add("c")
    table.finish_loads()
    assert table.slots.in_memory() == ["a", "c"]


def test_an_adapter_does_not_starve_behind_others_that_are_always_busy():
    """Two slots, two adapters with a request after the other, and a third: it gets its turn when those that run end."""
    table = Table(2)
    running = {name: table.add(name) for name in "ab"}
    table.finish_loads()
    table.begin(), table.begin()
    waiting = table.add("c")
    for _ in range(6):  # each new request comes before the old one ends
        for name, state in list(running.items()):
            running[name] = table.add(name)
            if state in table.running:
                table.end(state)
            table.finish_loads()
            while table.queue:
                table.begin()
    assert waiting in table.running, "it has run among them"


def test_requests_that_have_not_begun_make_way_and_come_back():
    table = Table(1, turn=2)
    many = [table.add("a") for _ in range(10)]
    table.finish_loads()
    first, second = table.begin(), table.begin()
    other = table.add("b")
    assert table.queue == many[2:], "none has ended since the adapter was read"
    table.end(first)
    assert table.queue == [], "those that have not begun wait again"
    table.end(second)
    table.finish_loads()
    assert table.queue == [other]
    table.end(table.begin())
    table.finish_loads()
    assert table.queue == many[2:], "nobody else waits: all are let in"
    last = table.add("b")
    served = []
    while table.queue:
        served.append(table.begin())
        table.end(served[-1])
        table.finish_loads()
    assert served == [many[2], last, *many[3:]]


def test_while_others_wait_an_adapter_lets_in_as_many_as_can_run():
    table = Table(1, turn=2)
    table.add("a")
    table.finish_loads()
    first = table.begin()
    many, others = [table.add("b") for _ in range(5)], [table.add("c") for _ in range(3)]
    table.end(first)
    table.finish_loads()
    assert table.queue == many[:2]
    for _ in range(2):
        table.end(table.begin())
    table.finish_loads()
    assert table.queue == others[:2]


def test_adapters_of_latency_sensitive_requests_come_first():
    table = Table(1)
    table.add("a")
    table.finish_loads()
    running = table.begin()
    table.add("b"), table.add("c", ServiceClass.LS)
    table.end(running)
    table.finish_loads()
    assert [state.request_id for state in table.queue] == ["c2"]


def test_best_effort_requests_that_have_not_begun_make_way_for_a_latency_sensitive_one() -> None:
    """Other LS work could keep them from running for ever."""
    table = Table(1)
    waiting = [table.add("a"), table.add("a")]
    table.finish_loads()
    assert table.queue == waiting
    urgent = table.add("b", ServiceClass.LS)
    table.finish_loads()
    assert table.queue == [urgent]
    table.end(table.begin())
    table.finish_loads()
    assert table.queue == waiting


def test_requests_of_an_adapter_are_let_in_by_class_and_then_fairly_between_tenants() -> None:
    table = Table(1, turn=3)
    table.add("a")
    table.finish_loads()
    running = table.begin()
    many = [table.add("b", tenant="x") for _ in range(4)]
    other, low = table.add("b", tenant="y"), table.add("b", ServiceClass.LS, rank=1)
    high = table.add("b", ServiceClass.LS)
    table.add("c")
    table.end(running)
    table.finish_loads()
    assert table.queue == [high, low, many[0]]
    for _ in range(3):
        table.end(table.begin())
    table.finish_loads()
    table.end(table.begin())
    table.finish_loads()
    assert other in table.queue


def test_two_names_of_the_same_files_have_one_slot_and_make_way_together() -> None:
    table = Table(1)
    first, second = table.add("a", digest="A"), table.add("a2", digest="A")
    table.finish_loads()
    third = table.add("a2", digest="A")
    assert table.queue == [first, second, third] and {state.lora_slot for state in table.queue} == {1}
    table.begin()
    other = table.add("b")
    table.end(first)
    table.finish_loads()
    assert table.queue == [other], "those of both names wait again"


def test_the_end_of_a_waiting_request_of_a_closing_adapter_is_no_trouble() -> None:
    bench = Bench("omniserve", device_blocks=8, max_num_seqs=1, lora=LoRAConfig(max_loras=1))
    bench.add("be1", output=20, lora="a"), bench.add("be2", lora="a"), bench.add("be3", output=1, lora="a")
    bench.run_until(lambda: "a" in bench.requests.loras.in_memory())
    bench.step()
    bench.add("be4", output=1, lora="b")
    assert bench.requests.states["be2"].phase is Phase.WAITING
    bench.scheduler.abort("be2", bench.now_s)
    bench.scheduler.check_integrity()
    bench.run_until(lambda: {"be1", "be3", "be4"} <= bench.finished)


def test_a_load_that_fails_fails_its_requests_alone():
    table = Table(1)
    states = [table.add("a"), table.add("a")]
    table.add("b")
    table.loads += [work for work in table.side_work.take() if isinstance(work, LoadLoRA)]
    (load,) = table.loads
    table.loads.clear()
    table.side_work.finish(Done(move_id=load.move_id, ok=False, message="gone"))
    assert table.slots.failed() == dict.fromkeys(states, "gone")
    for state in states:
        table.end(state)
    assert table.slots.failed() == {}
    table.finish_loads()
    assert [state.request_id for state in table.queue] == ["b2"]


@pytest.mark.parametrize("seed", range(40))
def test_every_request_runs_in_the_end(seed: int):
    """Random arrivals, starts, ends, aborts and failures; then nothing more comes, and all that is left is served."""
    rng = random.Random(seed)
    table = Table(rng.choice([1, 2, 3]), turn=rng.choice([1, 2, 5]))
    served = 0
    for _ in range(300):
        match rng.randrange(6):
            case 0 | 1:
                table.add(rng.choice(["", "a", "b", "c", "d", "e"]), rng.choice(list(ServiceClass)))
            case 2 if table.queue:
                table.begin()
            case 3 if table.running:
                table.end(rng.choice(table.running))
                served += 1
            case 4 if table.states:
                table.end(rng.choice(table.states))
            case 5:
                table.finish_loads(ok=rng.random() < 0.8)
                for state in table.slots.failed():
                    table.end(state)
    while table.states:
        before = len(table.states)
        table.finish_loads()
        while table.queue:
            table.begin()
        while table.running:
            table.end(table.running[0])
        assert len(table.states) < before, "nothing that is left can run"

"""The order of requests that begin alike."""

from __future__ import annotations

import math
import random
from collections import defaultdict

from omniserve.core.request import SLO, Request, ServiceClass
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.sched.fairness import ClassAccounts
from omniserve.sched.prefix_queue import MOST_PASSED, PrefixQueue
from omniserve.sched.state import Phase, PrefixUse, RequestState
from tests.sched.benches import Bench, names

_BLOCK = 4
_ACCOUNTS = defaultdict[int, ClassAccounts](ClassAccounts)


def waiting(
    *blocks: int, number: int, rank: int = 1, salt: str = "", cached: bool = True, tenant: str = ""
) -> RequestState:
    """Return a request whose prompt is of such blocks, named by their first tokens, and two more tokens."""
    prompt = [token for block in blocks for token in (block,) * _BLOCK] + [97, number]
    return RequestState(
        request_id=str(number), request=Request(prompt_token_ids=prompt, service_class="BE"), slo=SLO(),
        kind=ServiceClass.BE, priority_key=(rank, math.inf, number), account=_ACCOUNTS[rank].of(tenant, 1.0),
        arrival_s=0.0, token_ids=list(prompt),
        prefix=PrefixUse(PrefixKeys(_BLOCK, salt=salt)) if cached else None,
    )  # fmt: skip


def admit(queue: PrefixQueue, most: int = 1000) -> list[int]:
    """Let so many requests go by prefix; return their numbers."""
    numbers = []
    for state in queue.by_prefix():
        if len(numbers) == most:
            break
        queue.remove(state)
        state.phase = Phase.DEVICE
        numbers.append(state.order)
        if len(numbers) % 3 == 0:
            numbers += admit(queue, most - len(numbers))  # in steps of three
            break
    return numbers


def queue_of(*states: RequestState) -> PrefixQueue:
    queue = PrefixQueue()
    for state in states:
        queue.add(state)
    return queue


def test_those_go_on_that_share_most_with_the_last_one():
    prompts = {1: (1, 2, 3, 4), 2: (5,), 3: (1, 9), 4: (1, 2, 3, 4, 6), 5: (5, 5), 6: (1, 2, 7), 7: ()}
    queue = queue_of(*(waiting(*blocks, number=number) for number, blocks in prompts.items()))
    assert admit(queue) == [1, 4, 6, 3, 2, 5, 7]
    assert not queue._groups and not list(queue)


def test_without_a_cache_they_go_by_arrival():
    assert admit(queue_of(*(waiting(number % 2, number=number, cached=False) for number in range(6)))) == [*range(6)]


def test_another_salt_is_another_prefix_and_a_better_class_comes_first():
    states = [waiting(1, 1, number=number, salt="ab"[number % 2]) for number in range(4)]
    assert admit(queue_of(*states)) == [0, 2, 1, 3]
    states = [waiting(number % 2, number=number, rank=2 if number < 3 else 1) for number in range(6)]
    assert admit(queue_of(*states)) == [3, 5, 4, 0, 2, 1]


def test_nobody_is_passed_by_more_than_so_many():
    queue = queue_of(waiting(1, number=0), waiting(2, number=1), waiting(2, number=2))
    for number in range(3, 200):
        queue.add(waiting(1, number=number))
    order = admit(queue)
    assert order.index(1) == 1 + MOST_PASSED and order.index(2) == order.index(1) + 1, "and it brings its group along"
    assert sorted(order) == [*range(200)]


def test_one_that_has_begun_comes_first():
    began = waiting(2, number=1)
    began.first_scheduled_s = 0.0
    assert admit(queue_of(waiting(1, number=0), began, waiting(1, number=2))) == [0, 1, 2]


def test_one_that_is_refused_keeps_its_turn():
    queue = queue_of(*(waiting(number % 2, number=number) for number in range(6)))
    assert admit(queue, 1) == [0]
    for _ in range(3):
        assert [state.order for state in queue.by_prefix()] == [2]
    queue.add(waiting(0, number=6))
    assert admit(queue) == [2, 4, 6, 1, 3, 5]


def test_requests_that_leave_without_a_turn_are_forgotten():
    rng = random.Random(0)
    states = [waiting(*(rng.randrange(3) for _ in range(rng.randrange(6))), number=number) for number in range(100)]
    queue = queue_of(*states)
    assert next(queue.by_prefix()) is states[0]
    for state in rng.sample(states, 60):
        queue.remove(state)
        states.remove(state)
        if rng.random() < 0.3:
            assert next(queue.by_prefix()) in states
    assert sorted(admit(queue)) == [state.order for state in states] and not queue._groups


def test_the_policy_admits_by_prefix_unless_it_is_told_not_to():
    for in_order, expected in ((True, ["be0", "be2", "be1", "be3"]), (False, ["be0", "be1", "be2", "be3"])):
        bench = Bench("omniserve", device_blocks=100, num_protected=0, be_prefix_order=in_order)
        for number in range(4):
            bench.add(f"be{number}", prompt=9, salt="ab"[number % 2])
        plan, _ = bench.step()
        assert names(plan) == expected


def test_tenants_take_turns_and_each_goes_on_by_prefix() -> None:
    states = [waiting(1 + number % 2, number=number, tenant="ab"[number // 4], rank=9) for number in range(8)]
    queue = queue_of(*states)
    for account in queue.accounts:
        account.virtual_time = 0.0
    order = []
    for state in queue.by_prefix():
        state.note_admission()
        queue.remove(state)
        state.phase = Phase.DEVICE
        order.append(state.order)
    assert [number // 4 for number in order] == [0, 1] * 4
    assert order[::2] == [0, 2, 1, 3] and order[1::2] == [4, 6, 5, 7]
    assert not queue._num_passed

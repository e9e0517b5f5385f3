"""Placement: the device's own host first, then the others evenly; no host has more blocks than it holds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from omniserve.simulate.placement import Place, Placement, split_blocks


@pytest.mark.parametrize(
    ("num_blocks", "shares", "expected"),
    [(10, [1.0, 1.0], [5, 5]), (10, [1, 1, 1], [3, 4, 3]), (7, [400.0, 500.0], [3, 4]), (1, [1, 1], [0, 1])],
)
def test_the_parts_of_a_pool_add_up_to_it(num_blocks: int, shares: list[float], expected: list[int]) -> None:
    assert split_blocks(num_blocks, shares) == expected and sum(expected) == num_blocks


def test_the_first_host_is_filled_first_and_the_others_get_as_many_requests_each() -> None:
    held = {f"r{i}": 10 for i in range(9)}
    placement = Placement([30, 1000, 1000, 1000], held.__getitem__)
    places = [placement.arrive(request_id, 10) for request_id in held]
    assert [place.host for place in places] == [0, 0, 0, 1, 2, 3, 1, 2, 3]
    placement.forget("r1")
    assert placement.arrive("r1", 10) == Place(0), "the first host has room again"


def test_a_host_without_room_is_passed_over() -> None:
    held = {"a": 5, "b": 8, "c": 3, "d": 5}
    placement = Placement([5, 8, 12], held.__getitem__)
    assert [placement.arrive(request_id, blocks) for request_id, blocks in held.items()] == [
        Place(0), Place(1), Place(2), Place(2),
    ]  # fmt: skip


def test_blocks_that_come_later_go_where_the_others_are() -> None:
    held = {"a": 2, "b": 6}
    placement = Placement([8, 100], held.__getitem__)
    assert placement.arrive("a", 2) == Place(0) and placement.arrive("b", 6) == Place(0)
    held["a"] = 4  # the first host is full: all of it goes
    assert placement.arrive("a", 2) == Place(1, num_relocated=2, source=0)
    held |= {"a": 9, "b": 0}
    assert placement.arrive("a", 5) == Place(1), "it stays where it is, whatever room there is elsewhere"
    held["a"] = 3
    assert placement.arrive("a", 3) == Place(0), "nothing of it was left there"


def test_a_request_for_which_only_the_pool_has_room_goes_where_most_is_free_and_stays_there() -> None:
    held = {"a": 3, "b": 2, "c": 6}
    placement = Placement([4, 5, 5], held.__getitem__)
    assert [placement.arrive(request_id, blocks).host for request_id, blocks in held.items()] == [0, 1, 2]
    held["a"] = 4
    assert placement.grow("a") == Place(0)
    held |= {"b": 4}
    assert placement.grow("b") == Place(1)
    held |= {"c": 7}
    assert placement.grow("c") == Place(2)


def test_blocks_that_were_given_back_are_noticed_when_a_host_seems_to_be_full() -> None:
    held = {"a": 4, "b": 4}
    placement = Placement([4, 4], lambda request_id: held.get(request_id, 0))
    assert placement.arrive("a", 4) == Place(0)
    del held["a"]
    assert placement.arrive("b", 4) == Place(0)


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_to_the_memory_of_hosts_while_any_has_room(seed: int) -> None:
    rng = random.Random(seed)
    capacities = [rng.randint(10, 30) for _ in range(rng.randint(2, 5))]
    held: dict[str, int] = {}
    placement = Placement(capacities, lambda request_id: held.get(request_id, 0))
    on_first = elsewhere = relocated = 0
    for number in range(400):
        kind = rng.choice(["arrive", "arrive", "grow", "grow", "leave", "end"])
        request_id = rng.choice(list(held)) if held and kind != "arrive" else f"r{number}"
        if kind in ("leave", "end"):
            held.pop(request_id, None)
            if kind == "end":
                placement.forget(request_id)
            continue
        before, new = held.get(request_id, 0), rng.randint(1, 9)
        if sum(held.values()) + new > sum(capacities):
            continue
        was_on = placement.host_of(request_id) if before else None
        others: Counter[int] = Counter()
        for other in held.keys() - {request_id}:
            others[placement.host_of(other)] += held[other]
        held[request_id] = total = before + new
        place = placement.grow(request_id) if before else placement.arrive(request_id, new)
        has_room = [host for host, most in enumerate(capacities) if others[host] + total <= most]
        preferred = 0 if was_on is None else was_on
        assert placement.host_of(request_id) == place.host
        assert place.host == preferred or preferred not in has_room
        assert place.host in has_room or not has_room
        assert place.num_relocated == (before if was_on not in (None, place.host) else 0)
        on_first += place.host == 0
        elsewhere += place.host != 0
        relocated += place.num_relocated > 0
    assert on_first > 0 and elsewhere > 0 and relocated > 0

"""Tests of what best-effort requests leave to the prefixes of latency-sensitive ones."""

from __future__ import annotations

import pytest

from omniserve.core.errors import RequestRejected
from omniserve.kv.base import Tier
from omniserve.kv.disk_prefixes import DiskPrefixes
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.sched.state import Phase
from tests.sched.benches import Bench, Clock, names
from tests.sched.limits import BLOCK


@pytest.mark.parametrize("policy", ["omniserve", "llumnix"])
@pytest.mark.parametrize("num_protected", [0, 7])
def test_a_best_effort_request_is_admitted_beside_protected_prefixes_or_not_at_all(
    policy: str, num_protected: int
) -> None:
    bench = Bench(policy, device_blocks=10, num_protected=num_protected, ls_reserve_fraction=0.0)
    bench.add("ls", prompt=31, output=1)
    bench.run_until(lambda: "ls" in bench.finished)
    assert bench.requests.memory.ls_reserve == num_protected and bench.kv.num_free(Tier.DEVICE) == 10
    bench.add("be1", prompt=4, output=30)
    bench.step()
    bench.add("be2", prompt=15)
    bench.step()
    is_waiting = [state.request_id for state in bench.requests.waiting["BE"]] == ["be2"]
    assert is_waiting == (num_protected > 0), "four blocks, and one less than three are left"


@pytest.mark.parametrize("policy", ["omniserve", "conserve", "llumnix"])
def test_victims_that_share_blocks_give_way_until_enough_are_free(policy: str) -> None:
    bench = Bench(policy, device_blocks=10, num_protected=0, ls_reserve_fraction=0.0)
    for name in ("be1", "be2"):
        bench.add(name, prompt=17, salt="")
    bench.step()
    bench.step()
    shared = 0 if policy == "conserve" else 4  # whose rows may leave a step, so that nothing is found in the same one
    assert bench.kv.num_free(Tier.DEVICE) == shared and bench.requests.prefixes.num_cached_tokens["BE"] == 4 * shared
    bench.add("ls", prompt=31)
    plan, _ = bench.step()
    assert "ls" in names(plan), "the younger one alone would free one block of the four that are missing"
    assert [state.request_id for state in bench.requests.waiting["BE"]] == ["be1", "be2"]


def test_prefixes_are_protected_while_latency_sensitive_requests_come_back_to_some() -> None:
    bench = Bench("omniserve", device_blocks=10, num_protected=7, ls_reserve_fraction=0.0)

    def serve(name: str, salt: str) -> int:
        bench.add(name, prompt=31, output=1, salt=salt)
        bench.run_until(lambda: name in bench.finished)
        return bench.requests.memory.ls_reserve

    kept = [serve(f"ls{number}", f"salt {number}") for number in range(60)]
    assert kept[0] == 7 and kept[-1] == 0 and sorted(kept, reverse=True) == kept, "none comes back"
    bench.add("be", prompt=39, output=1)
    bench.run_until(lambda: "be" in bench.finished)
    assert serve("ls60", "salt 59") == 7, "it comes back, and finds nothing any more"
    assert bench.requests.prefixes.num_cached_tokens["LS"] == 0


@pytest.mark.parametrize("num_protected", [0, 7])
def test_a_best_effort_request_does_not_come_back_into_protected_prefixes(num_protected: int) -> None:
    bench = Bench(
        "omniserve", device_blocks=10, host_blocks=64, num_protected=num_protected, swap_in_delay_s=0.0,
        min_residence_s=0.0, ls_reserve_fraction=0.0,
    )  # fmt: skip
    bench.add("be", prompt=15)
    bench.step()
    bench.add("ls", prompt=31, output=1)
    bench.run_until(lambda: "ls" in bench.finished and bench.requests.residents.queue)
    places = [len(bench.requests.residents.queue) for _ in range(30) if bench.step()]
    if num_protected:
        assert places == [1] * 30 and bench.requests.memory.ls_reserve == 7, "it decodes on the host tier"
    else:
        assert 0 in places


def with_disk(num_tokens: int, *, block_s: float | None, **settings: object) -> Clock:
    """A machine whose disk has prompts with the salt "kept", and reads a block of them in so many seconds."""
    keys = PrefixKeys(BLOCK, salt="kept").up_to([7] * num_tokens, num_tokens // BLOCK)
    disk = DiskPrefixes(len(keys), [(key, slot) for slot, key in enumerate(keys)])
    caches = {"prefix_cache": True, "host_prefixes": True, "disk": disk}
    clock = Clock(host_blocks=200, caches=caches, **settings)
    clock.device.disk = {slot: (key, [7] * BLOCK) for slot, key in enumerate(keys)}
    clock.requests.loads.sources[0]._block_s = block_s
    return clock


def test_a_ttft_is_predicted_for_what_the_disk_has_not() -> None:
    computed = Clock().add("ls", prompt=500, ttft=60.0)
    assert computed is not None
    for block_s, is_sooner in ((None, True), (0.0001, True), (10.0, False)):
        clock = with_disk(480, block_s=block_s)
        predicted = clock.add("ls", prompt=500, ttft=60.0, salt="kept")
        assert predicted is not None
        if is_sooner:
            assert predicted < 0.1 * computed
        else:
            assert predicted == pytest.approx(computed)
        clock.run_until(lambda: "ls" in clock.first_s)  # noqa: B023
        assert (clock.device.num_read_blocks > 0) == is_sooner
    with pytest.raises(RequestRejected):
        Clock().add("ls", prompt=500, ttft=0.3)
    with_disk(480, block_s=0.0001).add("ls", prompt=500, ttft=0.3, salt="kept")


def test_who_waits_for_the_disk_holds_up_nobody() -> None:
    clock = with_disk(480, block_s=None)
    clock.add("be-kept", prompt=500, output=4, salt="kept")
    clock.add("be", prompt=20, output=4)
    clock.add("ls", prompt=20, output=4, ttft=60.0)
    clock.scheduler.schedule(clock.now_s)
    phases = {name: state.phase for name, state in clock.requests.states.items()}
    assert phases == {"be-kept": Phase.LOADING, "be": Phase.DEVICE, "ls": Phase.DEVICE}
    assert clock.scheduler.stats().waiting == {"LS": 0, "BE": 1}


def test_who_waits_for_the_disk_is_in_line() -> None:
    clock = with_disk(480, block_s=None)
    alone = clock.add("ls1", prompt=100, ttft=60.0)
    clock = with_disk(480, block_s=None)
    clock.add("ls-kept", prompt=600, ttft=60.0, salt="kept")
    clock.scheduler.schedule(clock.now_s)
    assert clock.requests.states["ls-kept"].phase is Phase.LOADING
    behind = clock.add("ls1", prompt=100, ttft=60.0)
    assert alone is not None and behind is not None
    assert behind > 2 * alone, "120 tokens will be left of the other one"


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    clock = with_disk(480, block_s=1.0)
    for number in range(200):
        name = f"ls{number}"
        clock.add(name, prompt=500, output=1, ttft=60.0, salt="kept")
        clock.run_until(lambda: name in clock.first_s)  # noqa: B023
        for block in [*clock.kv.prefixes._pool._idle, *clock.kv.prefixes._pool._idle_marked]:
            clock.kv.prefixes._pool._forget(block)
        clock.kv._copies.prefixes.reclaim(999)
        if clock.device.num_read_blocks:
            break
    assert 0 < number < 199

"""How often a request waits for copies from disk."""

from __future__ import annotations

from omniserve.core.work import Done
from omniserve.kv.disk_prefixes import DiskPrefixes
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.sched.state import Phase
from tests.sched.benches import Clock
from tests.sched.limits import BLOCK

NUM_BLOCKS = 25


def test_a_request_waits_for_four_copies_and_then_computes_what_the_host_has_lost() -> None:
    keys = PrefixKeys(BLOCK, salt="kept").up_to([7] * NUM_BLOCKS * BLOCK, NUM_BLOCKS)
    disk = DiskPrefixes(NUM_BLOCKS, [(key, slot) for slot, key in enumerate(keys)])
    clock = Clock(host_blocks=2 * NUM_BLOCKS, caches={"prefix_cache": True, "host_prefixes": True, "disk": disk})
    loads = clock.requests.loads

    def another_comes(name: str) -> tuple[Phase, Phase]:
        """Add an LS request that begins likewise, and look both up; return the phases of the two."""
        clock.add(name, prompt=NUM_BLOCKS * BLOCK + 1, salt="kept")
        loads.start(None, 0.0, running_ls=(), reserve_blocks=0)
        return clock.requests.states[name].phase, clock.requests.states["be"].phase

    def its_copy_ends(name: str) -> None:
        """End the copy for a request that was aborted meanwhile; at once the host needs the memory for others."""
        copy = clock.kv.prefixes.disk.reading(keys[0])
        clock.scheduler.abort(name, 0.0)
        clock.scheduler.notify([Done(move_id=copy, ok=True)])
        assert clock.requests.states["be"].phase is Phase.WAITING
        clock.kv._copies.prefixes.reclaim(2 * NUM_BLOCKS)

    clock.add("be", prompt=NUM_BLOCKS * BLOCK + 1, salt="kept")
    for number in range(4):
        assert another_comes(f"ls{number}") == (Phase.LOADING, Phase.LOADING), "both wait for one copy"
        its_copy_ends(f"ls{number}")
    assert another_comes("ls") == (Phase.LOADING, Phase.WAITING)
    its_copy_ends("ls")
    loads.look_again(clock.requests.states["be"])
    assert another_comes("ls-last") == (Phase.LOADING, Phase.LOADING), "it was preempted, and waits anew"

"""GroupHostTier: what the tier of rank 0 tells of those of all ranks."""

from __future__ import annotations

import torch

from omniserve.core.setup import HostTierSetup
from omniserve.parallel.host_tier import GroupHostTier
from omniserve.parallel.place import Place
from tests.host.helpers import BLOCK_SIZE, make_spec


def test_it_is_healthy_while_the_tiers_of_all_ranks_are() -> None:
    spec = make_spec()
    setup = HostTierSetup(
        block_size=BLOCK_SIZE, kv_bytes=8 * spec.kv_block_bytes(BLOCK_SIZE, "auto"), num_slots=2, num_threads=1
    )
    others = [True, False]
    tier = GroupHostTier(setup, spec=spec, dtype=torch.float32, device=torch.device("cpu"))
    tier.follow(Place(0, 2, 1), lambda: ([], others.pop(0), False), lambda what: None, lambda what: None)
    try:
        for is_healthy in (True, False):
            assert tier.poll() == []
            assert tier.healthy is tier.stats().healthy is is_healthy and tier.stats().threads_alive == 1
    finally:
        tier.close()

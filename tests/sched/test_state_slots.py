"""Recurrent states follow their requests through chunks, moves and host decodes, and begin anew when recomputed."""

from __future__ import annotations

import pytest

from omniserve.kv import KV_MANAGERS
from omniserve.sched import SCHEDULERS
from tests.quick import slow_except
from tests.sched import preemptible
from tests.sched.test_histories import REACHED, run_history


@pytest.mark.parametrize("kv", KV_MANAGERS.names())
@pytest.mark.parametrize("scheduler", [*SCHEDULERS.names(), preemptible.NAME])
def test_states_follow_requests_over_random_histories(scheduler: str, kv: str) -> None:
    totals = [run_history(scheduler, 5000 + seed, kv=kv, has_states=True) for seed in range(12)]
    assert sum(t["preemptions"] for t in totals) > 0
    assert sum(t["resumed"] for t in totals) == 0, "states do not stand where the kept tokens end"


@pytest.mark.parametrize("scheduler", REACHED)
@pytest.mark.parametrize("trouble", ["failures", "death"])
def test_states_survive_a_host_tier_that_fails(scheduler: str, trouble: str) -> None:
    for seed in range(8):
        run_history(
            scheduler, 5100 + seed, kv=("incremental", "bidirectional", "tiered")[seed % 3],
            failure_rate=0.1 * (trouble == "failures"), tier_down=trouble == "death", has_forecast=seed % 2 == 0,
            has_states=True,
        )  # fmt: skip


@pytest.mark.parametrize("scheduler", slow_except(("omniserve", "sarathi"), SCHEDULERS.names()))
def test_states_survive_steps_that_overlap(scheduler: str) -> None:
    for seed in range(12):
        kv = KV_MANAGERS.names()[seed % len(KV_MANAGERS.names())]
        run_history(scheduler, 5200 + seed, kv=kv, overlaps=True, has_states=True)

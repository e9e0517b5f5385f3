"""Steps that are planned and launched while the one before them runs: nothing is lost, nothing is computed wrongly."""

from __future__ import annotations

import pytest

from omniserve.kv import KV_MANAGERS
from omniserve.sched import SCHEDULERS
from tests.sched import preemptible
from tests.sched.test_histories import REACHED, run_history


@pytest.mark.parametrize("kv", KV_MANAGERS.names())
@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_overlapping_steps_lose_nothing(scheduler: str, kv: str) -> None:
    totals = [run_history(scheduler, 5000 + seed, kv=kv, overlaps=True) for seed in range(10 if kv == "tiered" else 5)]
    wanted = ["overtaken", "pending", "stopped"]
    if kv == "tiered":
        wanted += ["failed", "reused", "preemptions"]
    for key in wanted:
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("scheduler", REACHED)
def test_overlapping_steps_lose_nothing_with_a_forecast_and_a_failing_host(scheduler: str) -> None:
    totals = [
        run_history(
            scheduler, 6000 + seed, kv=("tiered", "incremental", "bidirectional")[seed % 3], overlaps=True,
            failure_rate=0.1 * (seed % 2), tier_down=seed % 4 == 0, has_forecast=seed % 5 != 0,
        )
        for seed in range(10)
    ]  # fmt: skip
    for key in ("overtaken", "pending", "stopped", "swaps_out"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("scheduler", [preemptible.NAME, "conserve"])
def test_steps_that_rows_may_leave_are_not_overtaken(scheduler: str) -> None:
    totals = [run_history(scheduler, 7000 + seed, halt_rate=0.4, overlaps=True) for seed in range(10)]
    for key in ("overtaken", "halts", "preemptions"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"

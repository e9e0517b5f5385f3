"""Deadlines for whole outputs on the simulator: LS requests that come and go, and best-effort work beside them."""

from __future__ import annotations

import dataclasses
import random

from omniserve import SLO, ClassSpec
from omniserve.simulate import Load, Result, SimulationConfig, simulate
from omniserve.simulate.load import lognormal_lengths, poisson, requests
from tests.engine_settings import flat_config
from tests.simulate.machines import BLOCK_BYTES, machine


def run(*, with_deadlines: bool) -> Result:
    rng = random.Random(5)
    lengths = lognormal_lengths(60, 10, max_input=300, max_output=40)
    ls = requests(poisson(2.0, 60.0, rng), lengths, rng)
    be = requests(poisson(4.0, 60.0, rng), lengths, rng)
    if with_deadlines:
        be = [dataclasses.replace(row, deadline_s=rng.choice([None, 2.0, 8.0])) for row in be]
    config = flat_config({
        "block_size": 16, "device_kv_bytes": 2000 * BLOCK_BYTES, "host_kv_bytes": 0, "max_num_batched_tokens": 256,
        "scheduler": "omniserve",
        "classes": (ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=0.5, tpot_s=0.1)), ClassSpec(name="BE", kind="BE")),
    })  # fmt: skip
    return simulate(
        SimulationConfig(
            machine=machine(base=5.0, row=1.0, key=0.01), engine=config, seed=1, drain_s=60.0,
            load=Load(latency_sensitive=ls, best_effort=be, duration_s=60.0),
        )
    )  # fmt: skip


def test_admitted_deadlines_are_kept_and_latency_sensitive_requests_lose_nothing():
    result, without = run(with_deadlines=True), run(with_deadlines=False)
    best_effort = result.classes["BE"]
    assert best_effort.num_deadlines > 30, best_effort
    assert best_effort.num_deadlines_met >= 0.9 * best_effort.num_deadlines, best_effort
    assert result.classes["LS"].attainment >= without.classes["LS"].attainment - 0.02
    assert without.classes["BE"].num_deadlines == without.classes["BE"].num_rejected == 0

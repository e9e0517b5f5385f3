"""Admission control on the simulator: a machine that others slow down now and then, with loads that it cannot bear."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from omniserve import SLO, ClassSpec
from omniserve.simulate import Load, Result, SimulationConfig, simulate
from omniserve.simulate.load import lognormal_lengths, requests, square_wave
from omniserve.simulate.spread import Spread
from tests.engine_settings import flat_config
from tests.quick import slow_except
from tests.simulate.machines import BLOCK_BYTES, machine

TTFT_S = 0.5


class Phases(Spread):
    """Steps take 1 to 8 times what the model says, as long for some dozens of them in a row."""

    def __init__(self) -> None:
        super().__init__([1.0], [1.0])

    def draws(self, rng: random.Random) -> Callable[[float], float]:
        left, slower = 0, 1.0

        def draw(predicted_s: float) -> float:
            nonlocal left, slower
            if left == 0:
                left, slower = rng.randint(20, 120), rng.choice([1.0, 1.0, 1.0, 2.0, 8.0])
            left -= 1
            return slower

        return draw


def run(seed: int, *, admission: bool) -> Result:
    rng = random.Random(seed)
    lengths = lognormal_lengths(60, 4, max_input=600, max_output=20)
    ls = requests(square_wave(0.5, 12.0, 10.0, 60.0, rng), lengths, rng)
    be = requests([0.1 * i for i in range(100)], lengths, rng)
    slo = SLO(ttft_s=TTFT_S, tpot_s=0.5)
    config = flat_config({
        "block_size": 16, "device_kv_bytes": 2000 * BLOCK_BYTES, "host_kv_bytes": 0, "max_num_batched_tokens": 256,
        "scheduler": "omniserve",
        "classes": (ClassSpec(name="LS", kind="LS", slo=slo), ClassSpec(name="BE", kind="BE")),
        "scheduler_options": {"admission": admission},
    })  # fmt: skip
    steady = machine(base=5.0, row=1.0, key=0.01)
    return simulate(
        SimulationConfig(
            machine=dataclasses.replace(steady, spread=Phases()), engine=config, seed=seed, drain_s=0.0,
            load=Load(latency_sensitive=ls, best_effort=be, duration_s=60.0),
        )
    )  # fmt: skip


@pytest.mark.parametrize("seed", slow_except((0,), range(3)))
def test_admission_brings_more_than_it_costs(seed: int) -> None:
    reached = []
    for admission in (True, False):
        times = [each.ttft_s for each in run(seed, admission=admission).requests if each.service_class == "LS"]
        served = [seconds for seconds in times if seconds is not None]
        reached.append((len(served), sum(seconds <= TTFT_S for seconds in served)))
    (served, attained), (served_by_all, attained_by_all) = reached
    assert attained >= attained_by_all, reached
    assert served + attained >= 0.9 * (served_by_all + attained_by_all), reached

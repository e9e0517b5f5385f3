"""Calibration: a machine as fast, and as unsteady, as the steps of a trace."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from pathlib import Path

import pytest

from omniserve import EngineConfig
from omniserve.core.config import DEFAULT_CLASSES
from omniserve.core.plan import StepPlan
from omniserve.latency import BatchFeatures, ScaledModel, StepSample, accuracy_of
from omniserve.latency.trace import StepTracer
from omniserve.simulate import Calibration, Load, SimulationConfig, simulate
from omniserve.simulate.calibration import COMPILED, LEAST_STEPS, read_samples
from omniserve.simulate.load import TraceRequest
from tests.sched.predictor import LinearPredictor
from tests.simulate.machines import DIMS, machine

DEVICE = LinearPredictor(num_layers=DIMS.num_layers, base=20.0, row=1.0, key=0.01)


def steps(count: int, *, sigma: float = 0.0, seed: int = 0, **milliseconds: float) -> list[StepSample]:
    """Return steps of a device of other speeds, with noise whose median is 1."""
    truth, rng = LinearPredictor(num_layers=DIMS.num_layers, **milliseconds), random.Random(seed)
    found = []
    for _ in range(count):
        features = BatchFeatures(
            prefill_tokens=rng.choice((0, 0, rng.randrange(2, 200))), decode_requests=rng.randrange(1, 20),
            decode_load=rng.uniform(0, 4000), dense_layers=DIMS.num_layers,
        )  # fmt: skip
        found.append(StepSample(features=features, seconds=truth.step_s(features) * rng.lognormvariate(0.0, sigma)))
    return found


def test_each_term_gets_a_factor_of_its_own_as_far_as_the_steps_show_it() -> None:
    samples = steps(600, base=24.0, row=1.0, key=0.02)
    calibration = Calibration.fitted(DEVICE, samples)
    base, row, key, piggyback = calibration.factors
    assert 1.0 <= row < base < key <= 2.0
    assert row < piggyback < key  # no step had any: it is as much slower as the others together
    assert accuracy_of(ScaledModel(DEVICE, calibration.factors), samples).p90 > 0.98
    assert accuracy_of(ScaledModel(DEVICE, [calibration.ratio] * 4), samples).p90 < 0.85


def test_steps_that_compiled_something_are_left_out() -> None:
    samples = steps(200, base=20.0, row=1.0, key=0.01)
    compiled = dataclasses.replace(samples[0], seconds=samples[0].seconds * 2 * COMPILED)
    calibration = Calibration.fitted(DEVICE, [compiled, *samples[1:]])
    assert (calibration.num_steps, calibration.num_left_out) == (200, 1)
    assert calibration.ratio == pytest.approx(1.0)
    assert str(calibration) == (
        "200 steps took 1.00 times what was predicted; then 9 of 10 are 1.00 to 1.00 times what is (1 left out)"
    )


def test_a_calibrated_machine_is_as_slow_and_as_unsteady_as_what_was_measured() -> None:
    samples = steps(1000, sigma=0.2, base=30.0, row=1.5, key=0.015)
    base = dataclasses.replace(machine(), device=DEVICE, forecast=DEVICE)
    calibrated = Calibration.fitted(DEVICE, samples).apply(base)
    assert calibrated.forecast is DEVICE
    config = EngineConfig(device_kv_bytes=1 << 24, host_kv_bytes=0, block_size=16, scheduler="sarathi")
    load = Load(latency_sensitive=[TraceRequest(0.0, 10, 2000)])
    seconds: list[float] = []
    for seed in range(3):
        settings = SimulationConfig(machine=calibrated, engine=config, load=load, seed=seed, drain_s=math.inf)
        simulate(settings, on_step=lambda step: seconds.append(step.seconds))
    expected = simulate(SimulationConfig(machine=base, engine=config, load=load, drain_s=math.inf)).end_s
    # The mean of a log-normal whose median is 1: exp(sigma^2 / 2).
    assert sum(seconds) / 3 == pytest.approx(1.5 * math.exp(0.02) * expected, rel=0.03)
    logs = [math.log(second) for second in seconds[2:2000]]  # one request's decodes: a smooth rise, and the noise
    changes = [b - a for a, b in itertools.pairwise(logs)]
    assert math.sqrt(sum(change**2 for change in changes) / 2 / len(changes)) == pytest.approx(0.2, rel=0.15)


def test_a_calibrated_simulation_is_another_for_another_seed() -> None:
    base = dataclasses.replace(machine(), device=DEVICE, forecast=DEVICE)
    calibrated = Calibration.fitted(DEVICE, steps(LEAST_STEPS, sigma=0.2)).apply(base)
    config = EngineConfig(device_kv_bytes=1 << 24, host_kv_bytes=0, block_size=16)

    def end_s(seed: int) -> float:
        load = Load(latency_sensitive=[TraceRequest(0.0, 10, 50)])
        return simulate(SimulationConfig(machine=calibrated, engine=config, load=load, seed=seed)).end_s

    assert end_s(1) == end_s(1) != end_s(2)


def test_too_few_steps_and_steps_of_another_model_are_refused() -> None:
    samples = steps(LEAST_STEPS)
    with pytest.raises(ValueError, match=f"at least {LEAST_STEPS} steps, got {LEAST_STEPS - 1}"):
        Calibration.fitted(DEVICE, samples[1:])
    with pytest.raises(ValueError, match="2 layers, not of this one with 3"):
        Calibration.fitted(LinearPredictor(num_layers=3), samples)


def test_a_trace_gives_its_whole_steps(tmp_path: Path) -> None:
    tracer = StepTracer(tmp_path / "steps", classes=DEFAULT_CLASSES)
    features = dataclasses.asdict(BatchFeatures(decode_requests=3, dense_layers=2.0))

    def record(*, seconds: float, halted: dict[str, int], features: dict[str, float]) -> None:
        tracer.record(
            StepPlan(step_id=0), started_s=0.0, seconds=seconds, features=features, terms={}, halted=halted,
            outputs=[], slos={}, classes={},
        )  # fmt: skip

    record(seconds=0.5, halted={}, features=features)
    record(seconds=0.1, halted={"a": 1}, features=features)  # half of a step
    [sample] = read_samples(tmp_path / "steps")
    assert sample == StepSample(features=BatchFeatures(decode_requests=3, dense_layers=2.0), seconds=0.5)
    record(seconds=0.5, halted={}, features={**features, "moons": 2.0})
    with pytest.raises(ValueError, match=r"another version of OmniServe: .*moons"):
        read_samples(tmp_path / "steps")


def test_a_factor_for_each_term() -> None:
    with pytest.raises(ValueError, match="4 terms, got 2 factors"):
        ScaledModel(DEVICE, (1.0, 1.0))
    with pytest.raises(ValueError, match="got none"):
        ScaledModel.fitted(DEVICE, [])
    features = BatchFeatures(decode_requests=3, decode_load=100.0, dense_layers=2.0)
    assert ScaledModel(DEVICE, (2.0,) * 4).step_s(features) == pytest.approx(2 * DEVICE.step_s(features))
    assert sum(ScaledModel(DEVICE, (0.0, 2.0, 0.0, 0.0)).modules_s(features)) == pytest.approx(3e-3)

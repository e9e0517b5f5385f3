"""What a simulated policy predicts with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from omniserve import SLO, ClassSpec, EngineConfig
from omniserve.latency import LATENCY_MODELS, BatchFeatures, CorrectedModel, LatencyModel, Predictor
from omniserve.latency.features import AlphaBeta
from omniserve.latency.linear import BROSModel, ConServeModel
from omniserve.latency.omniserve import OmniServeModel
from omniserve.simulate import Load, Machine, SimulationConfig, machine_of_profile, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.engine import SimulatedEngine
from omniserve.simulate.forecast import forecast_for, generated_profile
from omniserve.simulate.hardware import find_devices, find_hosts
from omniserve.simulate.host_tier import Copies, HostNode
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.models import find_model
from omniserve.simulate.runner import Chances
from tests.latency.samples import draw_steps, make_profile
from tests.simulate.machines import BLOCK_BYTES, machine
from tests.simulate.test_profile import SPEC

POOL = 4096
MODEL_OF = {
    "omniserve": "omniserve",
    "conserve": "omniserve",
    "bros": "omniserve",
    "conserve-paper": "conserve",
    "bros-paper": "bros",
}


def config(scheduler: str = "omniserve", **options: Any) -> EngineConfig:
    return EngineConfig(
        scheduler=scheduler, device_kv_bytes=1 << 24, host_kv_bytes=0, block_size=16, scheduler_options=options
    )


def engine_of(simulated: Machine, settings: EngineConfig) -> SimulatedEngine:
    return SimulatedEngine(simulated, settings, Chances(0), caches_prefixes=False)


def predictor_of(simulated: Machine, settings: EngineConfig) -> Predictor:
    forecast = engine_of(simulated, settings).scheduler.policy.forecast
    assert forecast is not None
    return forecast.predictor


def a100() -> Machine:
    _, device = find_devices("A100-80GB")
    _, host = find_hosts("Xeon-6342")
    return analytic_machine(find_model("llama-2-13b"), device, hosts=(host,))


@pytest.mark.parametrize(("scheduler", "name"), MODEL_OF.items())
def test_a_policy_predicts_with_its_own_model_of_the_measured_profile(scheduler: str, name: str) -> None:
    profile = make_profile(tuple(draw_steps(1, 50, lambda features: 0.01 + 1e-5 * features.rows)))
    simulated = machine_of_profile(profile, SPEC)
    found = predictor_of(simulated, config(scheduler))
    model = LATENCY_MODELS.get(name).from_profile(profile)
    if name == "omniserve":
        assert found is simulated.device, "perfect predictions, as steps take what this model says"
    else:
        assert isinstance(found, CorrectedModel) and type(found.model) is type(model)
    for sample in draw_steps(2, 20, lambda features: 1.0):
        assert found.step_s(sample.features) == model.step_s(sample.features)


def test_users_choose_the_model_of_any_policy() -> None:
    profile = make_profile(tuple(draw_steps(1, 50, lambda features: 0.01 + 1e-5 * features.rows)))
    found = forecast_for(machine_of_profile(profile, SPEC), config(latency_model="bros"), pool_tokens=POOL)
    assert isinstance(found, BROSModel)
    with pytest.raises(ValueError, match="latency model"):
        forecast_for(machine(), config(latency_model="none-such"), pool_tokens=POOL)


def test_without_a_profile_the_model_is_fitted_to_what_the_machine_predicts() -> None:
    """A machine whose steps are linear in their rows is one that ConServe's polynomial describes."""
    simulated = machine(key=0.0)
    found = forecast_for(simulated, config("conserve-paper"), pool_tokens=POOL)
    assert isinstance(found, ConServeModel)
    profile = generated_profile(simulated, config("conserve-paper"), POOL)
    rows = {(step.features.prefill_tokens, step.features.decode_requests) for step in profile.steps}
    assert (512, 0) in rows and (0, 8) in rows and all(not (some and others) for some, others in rows)
    for step in profile.steps:
        assert found.step_s(step.features) == pytest.approx(step.seconds, rel=0.01)


@pytest.mark.parametrize("name", ["conserve", "bros", "omniserve"])
def test_a_generated_profile_describes_a_machine_of_data_sheets(name: str) -> None:
    """Every latency model can be made of it; the one with modules of its own meets the machine's steps closely."""
    simulated = a100()
    settings = engine_config_for(simulated, scheduler="conserve-paper")
    profile = generated_profile(simulated, settings, 100_000)
    model: LatencyModel = LATENCY_MODELS.get(name).from_profile(profile)
    errors = [abs(model.step_s(step.features) / step.seconds - 1) for step in profile.steps]
    assert sum(errors) / len(errors) < {"conserve": 0.4, "bros": 0.25, "omniserve": 0.05}[name]
    if name == "omniserve":
        assert isinstance(model, OmniServeModel)
        step = BatchFeatures(
            prefill_requests=1, prefill_tokens=200, prefill_load=200 * 201 / 2, decode_requests=20,
            decode_context=20_000, decode_load=20_020.0, sampled_rows=21, dense_layers=float(simulated.spec.num_layers),
        )  # fmt: skip
        assert model.step_s(step) == pytest.approx(simulated.device.step_s(step), rel=0.1)


def steps_of(policy: str, *, swap_s: float, **options: Any) -> list[str]:
    """Return each step's chunks in a load whose BE requests lose their blocks to a long LS prompt, and come back."""
    hosts = (HostNode(num_threads=1, key_s=1e-6, task_s=1e-6, latency_s=1e-4),)
    simulated = dataclasses.replace(
        machine(hosts=hosts), copies=Copies(to_host=AlphaBeta(), to_device=AlphaBeta(swap_s))
    )
    steps: list[str] = []
    settings = EngineConfig(
        scheduler=policy, kv="bidirectional", block_size=16, device_kv_bytes=24 * BLOCK_BYTES,
        host_kv_bytes=64 * BLOCK_BYTES, scheduler_options=options,
        classes=(ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=1.0, tpot_s=0.1)), ClassSpec(name="BE", kind="BE")),
    )  # fmt: skip
    load = Load(
        latency_sensitive=[TraceRequest(0.0, 4, 300), TraceRequest(0.3, 220, 1)],
        best_effort=[TraceRequest(0.0, 60, 120) for _ in range(4)],
    )
    simulate(
        SimulationConfig(machine=simulated, engine=settings, load=load, check=True),
        on_step=lambda step: steps.append(f"{[(c.request_id, len(c.token_ids)) for c in step.plan.chunks]}"),
    )
    return steps


def test_the_simulated_bros_knows_what_copies_from_the_host_take() -> None:
    with_term, without = (steps_of("bros-paper", swap_s=0.3, swap_term=term) for term in (True, False))
    assert with_term != without
    with_term, without = (
        steps_of("bros-paper", swap_s=0.3, swap_term=term, latency_model="omniserve") for term in (True, False)
    )
    assert with_term == without, "this model has no term for it"

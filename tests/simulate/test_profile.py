"""Machines of a measured profile."""

from __future__ import annotations

import dataclasses

import pytest

from omniserve import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.latency import BatchFeatures, HostSpeed
from omniserve.latency.omniserve import OmniServeModel
from omniserve.simulate import Load, SimulationConfig, machine_of_profile, simulate
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.models import ModelDims
from tests.latency.samples import FINGERPRINT, LAYERS, SHAPE, make_profile, with_chunk

SPEC: ModelSpec = ModelDims(
    name="measured", num_layers=LAYERS, hidden_size=64, num_heads=4, num_kv_heads=2, head_size=16,
    intermediate_size=128, vocab_size=1000, max_model_len=2048,
).spec  # fmt: skip


def test_steps_hosts_and_copies_take_what_was_measured() -> None:
    profile = make_profile()
    machine = machine_of_profile(profile, SPEC)
    model, speed = OmniServeModel.from_profile(profile), HostSpeed.from_profile(profile)
    assert speed is not None
    (node,) = machine.hosts
    for requests, context in ((1, 512), (8, 4096)):
        seconds = node.key_s * context + node.task_s * requests + node.latency_s
        assert seconds == pytest.approx(speed(requests, context), rel=1e-6)
    assert machine.copies.to_host == profile.copy_to_host and machine.copies.to_device == profile.copy_to_device
    # Two threads alone and one shared: a CPU, whose host tier copies by itself and takes cores from the device tier.
    assert machine.copies.by_host_threads and not machine.host_has_own_cores

    request = TraceRequest(0.0, 100, 1)
    config = EngineConfig(device_kv_bytes=1 << 24, host_kv_bytes=0, block_size=16)
    result = simulate(SimulationConfig(machine=machine, engine=config, load=Load(latency_sensitive=[request])))
    features = with_chunk(SHAPE, BatchFeatures(), 0, 100, samples=True)
    assert result.requests[0].ttft_s == pytest.approx(model.step_s(features))


def test_a_gpu_keeps_its_cores_and_copies_by_itself() -> None:
    fingerprint = dataclasses.replace(FINGERPRINT, shared_threads=2)
    machine = machine_of_profile(dataclasses.replace(make_profile(), fingerprint=fingerprint), SPEC)
    assert machine.host_has_own_cores and not machine.copies.by_host_threads


def test_a_profile_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="4 layers"):
        machine_of_profile(make_profile(), dataclasses.replace(SPEC, num_layers=5, attention=SPEC.attention[:1] * 5))


def test_without_a_host_tier_there_is_no_host() -> None:
    profile = dataclasses.replace(
        make_profile(), host_attention=(), piggyback=(), fingerprint=dataclasses.replace(FINGERPRINT, host_threads=0)
    )
    assert machine_of_profile(profile, SPEC).hosts == ()

"""Machine: what a simulated engine runs on: a device that predicts its steps, hosts, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from omniserve.latency import LATENCY_MODELS, ModelShape, Predictor, Profile
from omniserve.latency.omniserve import OmniServeModel
from omniserve.simulate.host_tier import Copies, HostNode
from omniserve.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything that takes time."""

    name: str
    spec: ModelSpec
    device: Predictor
    """What steps take."""
    forecast: Predictor
    """What the scheduler believes that they take."""
    hosts: tuple[HostNode, ...] = ()
    """None: there is no host tier."""
    copies: Copies
    sends_during_step: bool = False
    """Rows go to the host tier while the step runs; else at its end."""
    host_has_own_cores: bool = True
    """A host tier at work takes nothing from the device tier."""
    device_kv_bytes: int | None = None
    """Memory for KV, all devices together; None: not known, the engine's settings say it."""
    host_kv_bytes: int | None = None
    """The same for the hosts."""

    @property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.spec)


def machine_of_profile(profile: Profile, spec: ModelSpec, *, latency_model: str = "omniserve") -> Machine:
    """Return the machine that a profile was measured on.

    Args:
        profile: The measurements.
        spec: The model's sizes, which a profile does not name.
        latency_model: What the scheduler predicts with; steps take what the model ``omniserve`` says.

    Raises:
        ValueError: The profile is of a model of another shape.
    """
    if profile.shape != ModelShape.of(spec):
        raise ValueError(
            f"the profile is of a model with {profile.shape.num_layers} layers and windows {profile.shape.windows}, "
            f"not of this one with {spec.num_layers}"
        )
    device = OmniServeModel.from_profile(profile)
    forecast = device if latency_model == "omniserve" else LATENCY_MODELS.get(latency_model).from_profile(profile)
    fingerprint = profile.fingerprint
    own_cores = fingerprint.device_threads == fingerprint.shared_threads
    return Machine(
        name=fingerprint.device,
        spec=spec,
        device=device,
        forecast=forecast,
        hosts=(_measured_node(device, fingerprint.host_threads),) if fingerprint.host_threads else (),
        copies=Copies(
            to_host=profile.copy_to_host, to_device=profile.copy_to_device, by_host_threads=not own_cores
        ),
        sends_during_step=not own_cores,
        host_has_own_cores=own_cores,
    )  # fmt: skip


def _measured_node(model: OmniServeModel, threads: int) -> HostNode:
    """Return the host whose tasks take what the profile says: its formula is linear, so three points tell it."""
    keys = 1024
    one, two, long = (model.host_layer_s(*load, threads) for load in ((1, 0), (2, 0), (1, keys)))
    return HostNode(
        num_threads=threads, key_s=(long - one) / keys, task_s=two - one, latency_s=max(0.0, 2 * one - two)
    )  # fmt: skip

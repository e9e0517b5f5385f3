"""Machine: what a simulated engine runs on: a device that predicts its steps, hosts, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.latency import HostSpeed, ModelShape, Predictor, Profile
from omniserve.latency.features import AlphaBeta
from omniserve.latency.omniserve import OmniServeModel
from omniserve.sched.late_joins import late_layers
from omniserve.simulate.host_tier import Copies, HostNode
from omniserve.simulate.spread import StepRatios

TOKEN = 0
"""The id of every token in a simulation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The simulated machine: a model on it, the time that each of its parts takes, and its memory."""

    name: str
    spec: ModelSpec
    device: Predictor
    """The model of how long steps take."""
    spread: StepRatios | None = None
    """The spread of steps around that model; None if they take exactly its times."""
    forecast: Predictor
    """The latency model of policies that predict with ``omniserve``."""
    profile: Profile | None = None
    """The measurements that models of other names are made of; None: what ``forecast`` says of a grid of steps."""
    hosts: tuple[HostNode, ...] = ()
    """Hosts of the host tier; empty without one."""
    copies: Copies
    host_has_own_cores: bool = True
    """A host tier at work takes nothing from the device tier, a GPU. Else both are one CPU."""
    late_layers: int = 0
    """Number of layers, from the first one on, in which a step looks for results as it reaches them; it then sends rows
    layer by layer as it runs (omniserve 3.2.3). 0: a step sends all rows at its end, and only results from before its
    beginning join."""
    device_kv_bytes: int | None = None
    """Memory for KV, all devices together; None: not known, the engine's settings say it."""
    host_kv_bytes: int | None = None
    """Memory for KV, all hosts together; None: not known, the engine's settings say it."""
    num_stages: int = 1
    """Stages of pipeline parallel. The device predicts a step that passes all of them alone; the hosts are those of all
    stages, and the bytes above are one stage's."""
    prefill_engines: tuple[PrefillNode, ...] = ()
    """Engines that compute prompts for this one."""

    @property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillNode:
    """A prefill engine."""

    machine: Machine
    config: EngineConfig | None = None
    """The prefill engine's settings; None: those of the engine that asks, with the pools that the machine has."""
    link: AlphaBeta
    """Seconds of a message between the two, by its bytes."""


def host_speed_of(hosts: Sequence[HostNode]) -> HostSpeed | None:
    """Return what the attention of one layer takes if these hosts share it evenly; None without hosts."""
    if not hosts:
        return None
    return HostSpeed(
        per_key_s=1 / sum(1 / host.key_s for host in hosts),
        per_request_s=max(host.task_s for host in hosts) / len(hosts),
        per_call_s=max(host.latency_s for host in hosts),
        threads=1,
        per_draft_key_s=max(host.draft_key_s / host.key_s for host in hosts) / sum(1 / host.key_s for host in hosts),
    )


def machine_of_profile(profile: Profile, spec: ModelSpec, *, num_stages: int = 1) -> Machine:
    """Return the machine that a profile was measured on; steps take what the model ``omniserve`` says.

    Args:
        spec: The model's sizes, which a profile does not name.
        num_stages: Stages of pipeline parallel that it was measured with. Each has a host tier like the measured one
            for its own layers; they are taken for one host with the threads of all.

    Raises:
        ValueError: The profile is of a model of another shape.
    """
    if profile.shape != ModelShape.of(spec):
        raise ValueError(
            f"the profile is of a model with {profile.shape.num_layers} layers, windows {profile.shape.windows} and "
            f"chunks {profile.shape.chunks}, not of this one with {spec.num_layers}"
        )
    device = OmniServeModel.from_profile(profile)
    hosts: tuple[HostNode, ...] = ()
    if (speed := HostSpeed.from_profile(profile)) is not None:
        threads = num_stages * speed.threads
        node = HostNode(
            num_threads=threads,
            key_s=speed.per_key_s / threads,
            task_s=speed.per_request_s / threads,
            latency_s=speed.per_call_s,
            draft_key_s=speed.per_draft_key_s / threads,
        )
        hosts = (node,)
    own_cores = profile.fingerprint.host_has_own_cores
    return Machine(
        name=profile.fingerprint.device,
        spec=spec,
        device=device,
        forecast=device,
        profile=profile,
        hosts=hosts,
        copies=Copies(to_host=profile.copy_to_host, to_device=profile.copy_to_device, by_host_threads=not own_cores),
        host_has_own_cores=own_cores,
        num_stages=num_stages,
        late_layers=late_layers(
            spec.num_layers, device_looks=own_cores, has_between=spec.state_bytes > 0, has_stages=num_stages > 1
        ),
    )

"""The places where ``simulator_validation`` runs an engine: a process, ranks, with a CPU host, with a prefill engine.

Each place knows the settings of the engine and of the simulated one, the model, and the machine to simulate.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common.models import MODELS, SMOLLM_135M, saved_llama, saved_smollm
from benchmarks.common.network import cpu_host, prefill_engine, secret_file
from omniserve import EngineConfig, HostsConfig, ParallelConfig
from omniserve.core.config import GIB
from omniserve.latency.features import AlphaBeta
from omniserve.launch.loading import EngineLoader
from omniserve.parallel.group import RankGroup
from omniserve.simulate import Calibration, Machine, PrefillNode
from omniserve.simulate.calibration import read_samples

EVEN_HEADS = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Sizes of the model for two ranks, which cannot share nine heads."""
FAR_MEMORY = 31 / 32
"""The network CPU host's part of the host tier."""
LINK_S = 0.5e-3
"""Seconds of a round trip over loopback, threads included (``network_hosts``)."""
LINK_BYTES_PER_S = 1e9
"""Speed of a message with KV over loopback, copies included."""
ONE_CORE: dict[str, Any] = {"block_size": 16, "device_threads": 1, "host_threads": 1}
"""Settings of an engine and of its prefill engine, which share this machine."""
_PREFILL_KV_GIB = 0.5
"""Memory for KV of each tier of a prefill engine."""


class Place:
    """An engine in one process.

    Args:
        stack: Ends the processes that the place has started.
        host_kv_bytes: Memory of the engine's host tier, with that of its CPU hosts.
        model: Name of the model, one of MODELS; the other places have SmolLM-135M's shape.
    """

    replays = True
    """The simulator can be given the times of the engine's steps: nothing else decides when something comes."""

    def __init__(self, stack: ExitStack, host_kv_bytes: int, model: str = "SmolLM-135M") -> None:
        self._stack, self._model = stack, model
        self.settings: dict[str, Any] = {}
        """Settings of the engine that differ from those of one process."""
        self.simulated_settings: dict[str, Any] = {}
        """Settings of the simulated engine that differ from those of one process."""

    def load(self, config: EngineConfig) -> tuple[PreTrainedModel, RankGroup | None]:
        """Return the model, and the other ranks if it has such."""
        return MODELS[self._model](), None

    def start(self) -> None:
        """Start what must not run while the profile is measured."""

    def calibrate(self, machine: Machine) -> None:
        """Take note of what steps of other engines took since the last call."""

    def machine(self, machine: Machine, *, calibrated: bool = False) -> Machine:
        """Return the machine to simulate, by that of one process; ``calibrated``: so are its other engines."""
        return machine


class RanksPlace(Place):
    """Two ranks of tensor parallel."""

    def __init__(self, stack: ExitStack, host_kv_bytes: int, model: str = "SmolLM-135M") -> None:
        super().__init__(stack, host_kv_bytes, model)
        self.settings = {"parallel": ParallelConfig(tensor_parallel_size=2)}

    def load(self, config: EngineConfig) -> tuple[PreTrainedModel, RankGroup | None]:
        model = str(saved_llama("smollm-135m-8-heads", SMOLLM_135M | EVEN_HEADS))
        loader = EngineLoader(model=model, dtype="auto", device="cpu", config=config)
        part, group = loader.start_ranks(lambda what: print(what, file=sys.stderr))
        self._stack.callback(self._end, group)
        return part, group

    @staticmethod
    def _end(group: RankGroup) -> None:
        group.keeps_ranks = False
        group.close()


class HostPlace(Place):
    """A CPU host in a process of its own, with most of the host tier's memory."""

    def __init__(self, stack: ExitStack, host_kv_bytes: int, model: str = "SmolLM-135M") -> None:
        super().__init__(stack, host_kv_bytes, model)
        secret = stack.enter_context(secret_file())
        address = stack.enter_context(cpu_host(secret, threads=1, kv_gib=FAR_MEMORY * host_kv_bytes / GIB))
        hosts = HostsConfig(cpu_hosts=("{}:{}".format(*address),), cpu_host_secret_file=str(secret))
        self.settings = {"hosts": hosts, "host_kv_bytes": int((1 - FAR_MEMORY) * host_kv_bytes)}

    def machine(self, machine: Machine, *, calibrated: bool = False) -> Machine:
        (own,) = machine.hosts
        far = dataclasses.replace(own, latency_s=own.latency_s + LINK_S, memory=FAR_MEMORY, num_threads=1)
        return dataclasses.replace(machine, hosts=(dataclasses.replace(own, memory=1 - FAR_MEMORY), far))


class PrefillPlace(Place):
    """A prefill engine for the same model in a process of its own, a core for each."""

    replays = False

    def __init__(self, stack: ExitStack, host_kv_bytes: int, model: str = "SmolLM-135M") -> None:
        super().__init__(stack, host_kv_bytes, model)
        self.settings, self.simulated_settings = dict(ONE_CORE), dict(ONE_CORE)
        self._folder = saved_smollm()
        kv_bytes = int(_PREFILL_KV_GIB * GIB)
        self._own = EngineConfig(device_kv_bytes=kv_bytes, host_kv_bytes=kv_bytes, **ONE_CORE)
        self._trace: Path
        self._calibrated: Machine
        self._num_seen = 0

    def load(self, config: EngineConfig) -> tuple[PreTrainedModel, RankGroup | None]:
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.bfloat16).eval(), None

    def start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._trace = folder / "steps.jsonl"
        engine = prefill_engine(
            self._folder,
            trace_steps=self._trace,
            device_kv_gib=_PREFILL_KV_GIB,
            host_kv_gib=_PREFILL_KV_GIB,
            **ONE_CORE,
        )
        self.settings["prefill"] = self._stack.enter_context(engine)

    def calibrate(self, machine: Machine) -> None:
        samples = read_samples(self._trace)
        new, self._num_seen = samples[self._num_seen :], len(samples)
        self._calibrated = Calibration.fitted(machine.device, new).apply(machine)

    def machine(self, machine: Machine, *, calibrated: bool = False) -> Machine:
        there = self._calibrated if calibrated else machine
        node = PrefillNode(machine=there, config=self._own, link=AlphaBeta(LINK_S, 1 / LINK_BYTES_PER_S))
        return dataclasses.replace(machine, prefill_engines=(node,))


PLACES: dict[str, type[Place]] = {
    "process": Place, "ranks": RanksPlace, "host": HostPlace, "prefill": PrefillPlace,
}  # fmt: skip

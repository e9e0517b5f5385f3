"""Engines of the GPU scripts: their settings, requests, and steps by the clock."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.requests import request
from benchmarks.common.timing import seconds, wait_for
from benchmarks.gpu.primed import PRIMED
from benchmarks.gpu.timing import reclaim_memory
from omniserve import Engine, EngineConfig, ExecutionConfig
from omniserve.core.spec import ModelSpec
from omniserve.latency.profile import Profile
from omniserve.ops.attention import DEVICE_ATTENTION, resolve_attention
from omniserve.sched.policy import known_options

NEVER_S = float(1 << 30)
_PACKAGES = {"xformers": "xformers", "triton": "triton"}
"""What an implementation of attention needs that may be missing."""
MODES: dict[str, dict[str, Any]] = {
    "as configured": {},
    "no step graphs": {"step_graphs": "off"},
    "no async steps": {"async_steps": False},
    "neither": {"step_graphs": "off", "async_steps": False},
}
"""Ways to run the same steps, the default one first."""


def attentions(device: torch.device) -> dict[str, str]:
    """Return the names of device attention, each with why it does not run here; empty: it does."""
    reasons = {}
    for name in DEVICE_ATTENTION.names():
        reasons[name] = ""
        if (package := _PACKAGES.get(name)) is not None and importlib.util.find_spec(package) is None:
            reasons[name] = f"{package} is not installed"
            continue
        try:
            resolve_attention(name, device)
        except ValueError as error:  # of another kind of device
            reasons[name] = str(error)
    return reasons


def kv_token_bytes(spec: ModelSpec) -> int:
    """Return the bytes of K and V of one token, all layers."""
    return spec.kv_block_bytes(1)


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a step reads: all but the rows of the embedding that nobody looks up."""
    total = sum(p.nbytes for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return total if tied else total - model.get_input_embeddings().weight.nbytes


def config_of(model: Any, *, mode: str = "as configured", **settings: Any) -> EngineConfig:
    """Return an engine's settings: those of a mode, those given, and the model's way of being compiled."""
    compile = bool(model.__dict__["_omniserve_patch"].options[0])
    return EngineConfig(execution=ExecutionConfig(compile=compile, **MODES[mode]), **settings)


@contextmanager
def open_engine(model: Any, config: EngineConfig, profile: Profile | None = None) -> Iterator[Engine]:
    """Give an engine whose device KV is random, and whose host KV is 0: who did not compute it can still read it."""
    reclaim_memory(model.device)
    with Engine(model, config, profile=profile) as engine:
        storage = engine.runner._storage
        for pool in (storage.k_LBKSH, storage.v_LBKSH):
            pool.normal_()
        yield engine


@contextmanager
def open_decoding(
    model: Any, *, batch: int, context: int, output: int, mode: str = "as configured", **settings: Any
) -> Iterator[Engine]:
    """Give an engine with LS requests ``ls0`` and so on that decode at a context, and need no prefill."""
    spec, block = model.omniserve.spec, settings.get("block_size", 64)
    blocks = batch * -(-(context + output) // block)
    defaults: dict[str, Any] = {
        "scheduler": PRIMED, "host_kv_bytes": 0, "max_model_len": context + output,
        "device_kv_bytes": (blocks + 1) * spec.kv_block_bytes(block),
        "max_num_seqs": max(batch, 1), "max_num_batched_tokens": max(batch, 512),
    }  # fmt: skip
    settings = defaults | settings
    options = known_options(settings["scheduler"], {"ls_reserve_fraction": 0.0, "swap_in_delay_s": NEVER_S})
    with open_engine(model, config_of(model, mode=mode, scheduler_options=options, **settings)) as engine:
        add_decoding(engine, batch, context, output)
        yield engine


def add_decoding(engine: Engine, batch: int, context: int, output: int) -> None:
    """Add LS requests ``ls0`` and so on to an engine of primed ones."""
    for i in range(batch):
        engine.add(request(f"ls{i}", context, output, engine.spec.vocab_size))


def renew(engine: Engine, batch: int, context: int, output: int) -> None:
    """Begin anew with these requests: what is compared is measured at the same contexts."""
    for i in range(batch):
        engine.abort(f"ls{i}")
    add_decoding(engine, batch, context, output)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Steps one after the other."""

    mean_s: float
    """By the device's events around all of them: its idle time between two steps counts."""
    p50_s: float
    """By the wall clock, of a step alone."""
    p99_s: float


def step_times(engine: Engine, count: int, *, warm_up: int = 6) -> StepTimes:
    """Time ``count`` steps, after a few that are not.

    Raises:
        RuntimeError: Requests ended meanwhile.
    """
    for _ in range(warm_up):
        engine.step()
    walls: list[float] = []

    def run() -> None:
        for _ in range(count):
            began_s = time.perf_counter()
            if any(output.finished for output in engine.step()):
                raise RuntimeError("a request ended while steps were timed: give it more tokens")
            walls.append(time.perf_counter() - began_s)

    mean_s = seconds(run, engine.model.device) / count
    walls.sort()
    return StepTimes(mean_s=mean_s, p50_s=statistics.median(walls), p99_s=walls[int(0.99 * (count - 1))])


def drain(engine: Engine, names: list[str]) -> None:
    """Abort requests, and step until what they held has been given back."""
    for name in names:
        engine.abort(name)
    while engine.has_unfinished:
        engine.step()
        engine.wait(0.01)
    wait_for(engine.model.device)

"""The model that a simulated policy predicts with: the one that its options name, made of a profile as in the engine.

A machine of a measured profile has that profile. For any other one a profile is generated: what the machine's forecast
says of modules alone, and of steps over a grid of rows and contexts. Paper: conserve 4.2, bros 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from omniserve.core.config import EngineConfig
from omniserve.engine.capacity import max_model_len
from omniserve.latency import LATENCY_MODELS, BatchFeatures, ModelShape, Predictor, Profile, StepRows, StepSample
from omniserve.latency.profile import STATES, Fingerprint
from omniserve.sched import policy_of
from omniserve.simulate.machine import Machine, host_speed_of

_OF_MACHINE = "omniserve"
"""Name of the latency model that a machine's ``forecast`` stands for."""
_LEAST_S = 1e-12
"""Seconds of a module that the forecast does not have: a profile's times are above 0."""

Row = TypeVar("Row", bound=tuple[float, ...])


def forecast_for(machine: Machine, config: EngineConfig, *, pool_tokens: int) -> Predictor:
    """Return what the policy of these settings predicts with.

    Args:
        pool_tokens: Tokens that the device pool holds.

    Raises:
        ValueError: There is no latency model of the name that the policy's options have.
    """
    name = policy_of(config)[1].latency_model
    if name == _OF_MACHINE:
        return machine.forecast
    profile = machine.profile if machine.profile is not None else generated_profile(machine, config, pool_tokens)
    return LATENCY_MODELS.get(name).from_profile(profile)


def generated_profile(machine: Machine, config: EngineConfig, pool_tokens: int) -> Profile:
    """Return the profile that measuring the machine would give, if its forecast were exact.

    It has no piggyback rows, and no drafts on the host.
    """
    forecast, shape, host = machine.forecast, machine.shape, host_speed_of(machine.hosts)
    longest = min(max_model_len(config, machine.spec), pool_tokens)
    widest = min(config.max_num_batched_tokens, longest)
    counts = _powers(min(config.max_num_seqs, config.max_num_batched_tokens))
    chunks = [
        (rows, context)
        for context in (0, *(widest * power for power in _powers(longest // widest)))
        for rows in _powers(widest)
        if context + rows <= longest
    ]
    decodes = [(count, keys) for count in counts for keys in _powers(longest) if count * keys <= pool_tokens]
    steps = [_chunk(shape, *point) for point in chunks] + [_decodes(shape, *point) for point in decodes]

    def attention_s(step: BatchFeatures, works: bool) -> float:
        step.host_works = works
        return max(_LEAST_S, forecast.modules_s(step)[1])

    def dense_s(rows: int, works: bool) -> float:
        step = _decodes(shape, rows, 1)
        step.host_works = works
        return max(_LEAST_S, forecast.modules_s(step)[0])

    def head_s(rows: int, works: bool) -> float:
        step = _decodes(shape, rows, 1)
        step.host_works = works
        with_head_s, step.sampled_rows = forecast.step_s(step), 0
        return max(_LEAST_S, with_head_s - forecast.step_s(step))

    return Profile(
        fingerprint=_fingerprint(machine, config),
        shape=shape,
        seconds=0.0,
        dense=_by_state(lambda works: ((n, dense_s(n, works)) for n in _powers(widest))),
        head=_by_state(lambda works: ((n, head_s(n, works)) for n in counts)),
        prefill_attention=_by_state(
            lambda works: ((*point, attention_s(_chunk(shape, *point), works)) for point in chunks)
        ),
        decode_attention=_by_state(
            lambda works: ((n, n * keys, attention_s(_decodes(shape, n, keys), works)) for n, keys in decodes)
        ),
        host_attention=tuple((n, n * keys, 1, host(n, n * keys)) for n, keys in decodes) if host is not None else (),
        copy_to_host=machine.copies.to_host,
        copy_to_device=machine.copies.to_device,
        steps=tuple(StepSample(features=step, seconds=forecast.step_s(step)) for step in steps),
    )


def _powers(most: int) -> list[int]:
    """Return the powers of two up to ``most``."""
    return [1 << exponent for exponent in range(most.bit_length())]


def _chunk(shape: ModelShape, rows: int, context: int) -> BatchFeatures:
    """Return a step of a chunk of a prompt."""
    step = StepRows(shape, BatchFeatures())
    step.add_chunk(context, rows, samples=1)
    return step.features


def _decodes(shape: ModelShape, count: int, keys: int) -> BatchFeatures:
    """Return a step of decodes, each of which sees ``keys`` keys if no window hides them."""
    step = StepRows(shape, BatchFeatures())
    step.add_decodes(count, count * (keys - 1), count * shape.keys_seen(keys - 1, 1), samples=count)
    return step.features


def _by_state(rows: Callable[[bool], Iterable[Row]]) -> Mapping[str, tuple[Row, ...]]:
    """Return rows for either state of the cores; ``rows`` is asked with whether the host tier works."""
    return {state: tuple(rows(state == STATES[1])) for state in STATES}


def _fingerprint(machine: Machine, config: EngineConfig) -> Fingerprint:
    """Return conditions of which only the machine's name, and whether its hosts have cores of their own, are known."""
    return Fingerprint(
        model="",
        dtype="",
        device=machine.name,
        device_threads=2,
        shared_threads=2 if machine.host_has_own_cores else 1,
        host_threads=1 if machine.hosts else 0,
        host_kv_dtype=config.host_pool_dtype,
        kv_dtype=config.execution.kv_dtype,
        block_size=config.block_size,
        attention="",
        compile=False,
        torch="",
        extension="",
        kernels="",
    )

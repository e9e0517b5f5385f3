"""Changes that take one wait, one event or one buffer's life out of the product; each must be found.

They are of what orders the device's work and the host's: without one of them some order gives wrong tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from omniserve.host import mover, tier
from omniserve.host.mover import DirectMover, Mover, StagedMover
from omniserve.host.tier import HostTier
from omniserve.ops.streams import AsyncHostCopy, StreamEvent, wait_for
from omniserve.runner import late_results
from omniserve.runner.cuda_graphs.capture import CudaGraphCapture
from omniserve.runner.cuda_graphs.inputs import StaticInputs
from omniserve.runner.late_results import MissedJoins, wanted_flags
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.runner import LaunchedStep, ModelRunner
from omniserve.runner.safepoint import LayerThrottle
from omniserve.runner.step_inputs import rows_of
from tests.streams.tensors import LazyTensor

Change = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of the product, and a case whose histories come to what it changes."""

    case: str
    change: Change
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the case; see ``Bench.run``."""
    first_seed: int = 0
    """Seed of the first history that is tried; those before it do not come to the change, or run in a kind order."""


def _replace(owner: Any, name: str, value: Any) -> Change:
    @contextlib.contextmanager
    def change() -> Iterator[None]:
        with mock.patch.object(owner, name, value):
            yield

    return change


def _bring_without_waiting(rows: PiggybackRows, plan: Any) -> None:
    ready = rows_of([join for join in plan.joins if join.is_ready], rows.max_rows)
    if rows._stream is not None and ready:
        rows._gather(torch.tensor(ready))


def _drafts_by_themselves(joins: Any) -> list[int]:
    return [max(0, flag) for flag in wanted_flags(joins)]


def _follow_nothing(mover: Mover, device: torch.device) -> None:
    if mover._stream is None:
        mover._stream = torch.cuda.Stream(device)


def _over_at_once(owner: type, name: str) -> Change:
    launch = getattr(owner, name)

    def launch_and_forget(*args: Any, **kwargs: Any) -> Callable[[], bool]:
        launch(*args, **kwargs)
        return lambda: True

    return _replace(owner, name, launch_and_forget)


def _copy_without_ids(make: Any) -> Any:
    return lambda move, is_over, num_bytes=0, error="", ids_2M=None: make(move, is_over, num_bytes, error)


def _wait_for_nothing(copy: AsyncHostCopy) -> list[Tensor]:
    copy._done = types.SimpleNamespace(wait=lambda what: None)  # type: ignore[assignment]
    return _wait(copy)


def _tell_without_waiting(misses: MissedJoins) -> frozenset[str]:
    misses._copy._done = types.SimpleNamespace(wait=lambda what: None)  # type: ignore[assignment]
    return _tell(misses)


_tell = MissedJoins._result
_wait = AsyncHostCopy.wait
_start_copy = AsyncHostCopy.__init__


def _record_first(copy: AsyncHostCopy, tensors: Any) -> None:
    before = StreamEvent(torch.device("cuda"))
    _start_copy(copy, tensors)
    copy._done = before


@contextlib.contextmanager
def _one_copy_buffer() -> Iterator[None]:
    make, buffer = torch.empty, torch.empty(4096, dtype=torch.int64, pin_memory=True)

    def empty(size: Any, **settings: Any) -> Tensor:
        return buffer[: size.numel()] if settings.get("pin_memory") else make(size, **settings)

    def start(copy: AsyncHostCopy, tensors: Any) -> None:
        with mock.patch.object(torch, "empty", empty):
            _start_copy(copy, tensors)

    with mock.patch.object(AsyncHostCopy, "__init__", start):
        yield


@contextlib.contextmanager
def _one_input_buffer() -> Iterator[None]:
    buffers: dict[torch.Size, Tensor] = {}

    def buffer_of(inputs: StaticInputs, target: Tensor) -> Tensor:
        if target.shape not in buffers:
            buffers[target.shape] = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        return buffers[target.shape]

    with mock.patch.object(StaticInputs, "_host_buffer", buffer_of):
        yield


@contextlib.contextmanager
def _inputs_beside_the_step() -> Iterator[None]:
    fill, side = StaticInputs.fill, torch.cuda.Stream()

    def fill_beside(*args: Any, **kwargs: Any) -> None:
        with torch.cuda.stream(side):
            fill(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)

    with mock.patch.object(StaticInputs, "fill", fill_beside):
        yield


def _compile_without_waiting(mover: DirectMover, compile: Any = DirectMover._compile) -> None:
    with mock.patch.object(torch.cuda, "synchronize", lambda *_: None):
        compile(mover)


def _expect_what_is_there(
    host: HostTier, step: int, layers: Tensor, slots: Tensor, widths: Tensor, expect: Any = HostTier.expect,
    **settings: bool,
) -> None:  # fmt: skip
    assert host.flags_S is not None
    host.flags_S.view(-1, host.max_rows)[slots] = step
    expect(host, step, layers, slots, widths, **settings)


def _drain_one_stream(device: torch.device) -> None:
    wait_for(torch.cuda.current_stream(device).record_event(), "what the current stream was given")


_announce = PiggybackRows.announce


@contextlib.contextmanager
def _number_beside_the_step() -> Iterator[None]:
    side = torch.cuda.Stream()

    def announce(rows: PiggybackRows, plan: Any) -> None:
        with torch.cuda.stream(side):
            _announce(rows, plan)
        torch.cuda.current_stream().wait_stream(side)

    with mock.patch.object(PiggybackRows, "announce", announce):
        yield


def _read_at_once(tensor: LazyTensor) -> Tensor:
    return tensor.raw.clone()


MUTATIONS: Mapping[str, Mutation] = {
    "tokens are read before their copy is over": Mutation("device", _replace(AsyncHostCopy, "wait", _wait_for_nothing)),
    "the event of the tokens is recorded before their copy": Mutation(
        "device", _replace(AsyncHostCopy, "__init__", _record_first)
    ),
    "missed joins are read before their copy is over": Mutation(
        "late results", _replace(MissedJoins, "_result", _tell_without_waiting)
    ),
    "missed joins of captured steps are read before their copy is over": Mutation(
        "late results, graphs", _replace(MissedJoins, "_result", _tell_without_waiting)
    ),
    "the tokens of all steps come into one buffer": Mutation("device", _one_copy_buffer, first_seed=1),
    "the inputs of all steps leave from one page-locked buffer": Mutation("device, graphs", _one_input_buffer),
    "a step's inputs are written while the step before runs": Mutation(
        "device, graphs", _inputs_beside_the_step, first_seed=3
    ),
    "a step's number is written while the step before runs": Mutation(
        "host, graphs", _number_beside_the_step, first_seed=3
    ),
    "layers do not wait for the results that join them": Mutation(
        "host", _replace(PiggybackRows, "bring", _bring_without_waiting)
    ),
    "captured layers do not wait for the results that join them": Mutation(
        "host, graphs", _replace(PiggybackRows, "bring", _bring_without_waiting)
    ),
    "drafts join without their token": Mutation(
        "drafts", _replace(late_results, "wanted_flags", _drafts_by_themselves)
    ),
    "rows count as sent when they are expected": Mutation("host", _replace(HostTier, "expect", _expect_what_is_there)),
    "moves do not wait for the steps before them": Mutation(
        "host", _replace(Mover, "_follow_current_stream", _follow_nothing)
    ),
    "staged moves do not wait for the steps before them": Mutation(
        "staged moves", _replace(Mover, "_follow_current_stream", _follow_nothing)
    ),
    "moves are over when they are launched": Mutation("host", _over_at_once(DirectMover, "_launch")),
    "hops of staged moves are over when they are launched": Mutation(
        "staged moves", _over_at_once(StagedMover, "_on_device")
    ),
    "a move's block ids are let go at its launch": Mutation(
        "host", _replace(mover, "_Copy", _copy_without_ids(mover._Copy))
    ),
    "moves are compiled in memory that is let go at once": Mutation(
        "host", _replace(DirectMover, "_compile", _compile_without_waiting)
    ),
    "a second sub-batch's rows are read before they are there": Mutation(
        "neo", _replace(LazyTensor, "cpu", _read_at_once)
    ),
    "an engine closes while steps run": Mutation(
        "host", _replace(tier, "drain", lambda device: None), {"closes_after": 14}
    ),
    "a host tier closes while moves run": Mutation(
        "host", _replace(tier, "drain", _drain_one_stream), {"closes_after": 14}, first_seed=2
    ),
}
"""Name: what is taken out."""


def _collect_without_end(runner: ModelRunner, step: LaunchedStep, collect: Any = ModelRunner.collect) -> Any:
    return collect(runner, dataclasses.replace(step, end=None))


def _capture_without_waiting(capture: Any, run: Any, inner: Any = CudaGraphCapture._capture) -> Any:
    with mock.patch.object(torch.cuda, "synchronize", lambda *_: None):
        return inner(capture, run)


PACE: Mapping[str, Mutation] = {
    "steps without tokens are not waited for": Mutation(
        "device", _replace(ModelRunner, "collect", _collect_without_end), {"max_num_batched_tokens": 4}
    ),
    "the host runs ahead of the layers that it asks about": Mutation(
        "safepoints, graphs", _replace(LayerThrottle, "wait", lambda throttle: None)
    ),
    "graphs are captured while the device works": Mutation(
        "host, graphs", _replace(CudaGraphCapture, "_capture", _capture_without_waiting)
    ),
}
"""Waits that keep the host near the device, or a capture alone on it. No token depends on them."""

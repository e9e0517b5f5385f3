"""Safepoints: best-effort rows leave a step between two layers, and go on there in a later one. Paper: conserve 4.3.

ConServe drops what such rows had computed. Here their hidden states wait, so that only the rest is computed later; a
setting drops them too, for comparison. Legend: T rows of a chunk, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.ops.device_copies import event_on
from omniserve.ops.waiting import wait_for


class HaltedRows:
    """Hidden states of chunks that left a step.

    Args:
        keep: Keep them; False: drop them, as ConServe does.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._rows: dict[str, tuple[int, int, Tensor]] = {}

    def halt(self, chunk: DeviceChunk, layer: int, hidden_TD: Tensor) -> int:
        """Take the rows of a chunk that leaves before ``layer``.

        Returns:
            What ``StepOutput.halted`` says of it: the layer, or 0 if they are dropped.
        """
        if not self._keep:
            return 0
        self._rows[chunk.request_id] = (layer, chunk.start, hidden_TD.clone())
        return layer

    def take(self, chunk: DeviceChunk) -> Tensor:
        """Return the rows of a chunk that goes on, and forget them.

        Raises:
            RuntimeError: They are not here, or are those of other tokens.
        """
        layer, start, hidden_TD = self._rows.pop(chunk.request_id, (0, 0, None))
        if hidden_TD is None or (layer, start, len(hidden_TD)) != (chunk.from_layer, chunk.start, len(chunk.token_ids)):
            raise RuntimeError(f"chunk of {chunk.request_id} at {chunk.start} did not leave before {chunk.from_layer}")
        return hidden_TD

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the rows of requests that ended or began anew."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)


class LayerPace:
    """Keeps the host's calls at most a layer ahead of the device, which always has one more layer to run.

    A GPU is given layers long before it runs them: a safepoint asked as they are given would be asked too early.

    Args:
        device: The device tier's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None

    def keep(self) -> None:
        """Wait until the device has done what it had been given at the last call. Without a GPU there is no waiting.

        Raises:
            Stalled: The device did not get there in time.
        """
        if self._device.type != "cuda":
            return
        event = event_on(self._device)
        if self._last is not None:
            wait_for(self._last, "a layer")
        self._last = event


class Safepoints:
    """Which rows of a step are at each layer: preemptible rows may leave before it, and others go on there.

    Args:
        plan: The step.
        halted: Takes the rows that leave, and holds those that go on.
        must_leave: Asked before each layer at which preemptible rows are: must they leave? None: they never do.
        device: The device tier's.
    """

    def __init__(
        self, plan: StepPlan, *, halted: HaltedRows, must_leave: Callable[[], bool] | None, device: torch.device
    ) -> None:
        self._plan = plan
        self._halted = halted
        self._must_leave = must_leave
        self._pace = LayerPace(device)
        self.present = _until_layer(plan, 0)
        """The step with the chunks that are at this layer; another object after each change."""
        self.left: dict[str, int] = {}
        """Request -> the layer before which its chunk left."""

    def before_layer(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Let rows leave before a layer, and go on there; return the rows that are at it, ``[T, D]``."""
        if layer and self._are_to_leave():
            hidden_TD = self._leave(layer, hidden_TD)
        if layer and any(chunk.from_layer == layer for chunk in self._plan.chunks):
            hidden_TD = self._rejoin(layer, hidden_TD)
        return hidden_TD

    def _are_to_leave(self) -> bool:
        is_there = any(chunk.request_id in self._plan.preemptible for chunk in self.present.chunks)
        if not is_there or self._must_leave is None:
            return False
        self._pace.keep()
        return self._must_leave()

    def _leave(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Halt the preemptible chunks that are here, and leave out those that would go on later; return other rows."""
        preemptible = self._plan.preemptible
        kept: list[Tensor] = []
        row = 0
        for chunk in self.present.chunks:
            rows_TD = hidden_TD[row : row + len(chunk.token_ids)]
            row += len(chunk.token_ids)
            if chunk.request_id in preemptible:
                self.left[chunk.request_id] = self._halted.halt(chunk, layer, rows_TD)
            else:
                kept.append(rows_TD)
        later = (c for c in self._plan.chunks if c.from_layer >= layer and c.request_id in preemptible)
        self.left |= {chunk.request_id: chunk.from_layer for chunk in later}  # they stay where they are
        self.present, self._plan = _without(self.present, self.left), _without(self._plan, self.left)
        return torch.cat([*kept, hidden_TD[row:]])

    def _rejoin(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Put the rows that left an earlier step before this layer behind the other device rows."""
        self.present = _until_layer(self._plan, layer)
        back = [self._halted.take(chunk) for chunk in self.present.chunks if chunk.from_layer == layer]
        n = sum(len(chunk.token_ids) for chunk in self.present.chunks) - sum(map(len, back))
        return torch.cat([hidden_TD[:n], *back, hidden_TD[n:]])


def _until_layer(plan: StepPlan, layer: int) -> StepPlan:
    """Return a plan with the chunks that are at a layer: those that began before it, then those that go on there."""
    chunks = sorted((c for c in plan.chunks if c.from_layer <= layer), key=lambda chunk: chunk.from_layer)
    return dataclasses.replace(plan, chunks=tuple(chunks))


def _without(plan: StepPlan, request_ids: Iterable[str]) -> StepPlan:
    """Return a plan without the chunks of some requests."""
    left_out = set(request_ids)
    return dataclasses.replace(plan, chunks=tuple(c for c in plan.chunks if c.request_id not in left_out))

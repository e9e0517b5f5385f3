"""Safepoints: best-effort rows leave a step between two layers, and go on there in a later one. Paper: conserve 4.3.

ConServe drops what such rows had computed. Here their hidden states wait, so that only the rest is computed later; a
setting drops them too, for comparison. Legend: T rows of a chunk, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

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


def until_layer(plan: StepPlan, layer: int) -> StepPlan:
    """Return a plan with the chunks that are there at a layer: those that began before, then those that go on there."""
    chunks = sorted((c for c in plan.chunks if c.from_layer <= layer), key=lambda chunk: chunk.from_layer)
    return dataclasses.replace(plan, chunks=tuple(chunks))


def without(plan: StepPlan, request_ids: Iterable[str]) -> StepPlan:
    """Return a plan without the chunks of some requests."""
    left_out = set(request_ids)
    return dataclasses.replace(plan, chunks=tuple(c for c in plan.chunks if c.request_id not in left_out))

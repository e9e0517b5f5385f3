"""Safepoints: rows leave a step between two layers, and go on there in a later step. Paper: conserve 4.3, omniserve 6.

ConServe drops the work of such rows. Here their hidden states are kept, so that a later step only computes the rest; a
setting drops them, for comparison. Legend: T rows of a chunk, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Set

import torch
from torch import Tensor

from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.ops.streams import StreamEvent
from omniserve.runner.layer_loop import LayerLoop, StepHooks, StepRun
from omniserve.runner.step_inputs import LayersOutput


class HaltedRows:
    """Hidden states of chunks that left a step; without ``keep`` they are dropped, as ConServe does."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self.rows: dict[str, tuple[int, int, Tensor]] = {}
        """Halted chunks by request: (layer at which the chunk goes on, its first token, its rows)."""

    def halt(self, chunk: DeviceChunk, layer: int, hidden_TD: Tensor) -> int:
        """Keep the rows of a chunk that leaves before ``layer``; return the layer at which it goes on."""
        if not self._keep:
            return 0
        self.rows[chunk.request_id] = (layer, chunk.start, hidden_TD.clone())
        return layer

    def take(self, chunk: DeviceChunk) -> Tensor:
        """Return the rows of a chunk that goes on, and forget them.

        Raises:
            RuntimeError: No rows were kept for the chunk, or rows of other tokens.
        """
        layer, start, hidden_TD = self.rows.pop(chunk.request_id, (0, 0, None))
        if hidden_TD is None or (layer, start, len(hidden_TD)) != (chunk.from_layer, chunk.start, len(chunk.token_ids)):
            raise RuntimeError(f"chunk of {chunk.request_id} at {chunk.start} did not leave before {chunk.from_layer}")
        return hidden_TD

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the rows of requests that ended or started again."""
        for request_id in request_ids:
            self.rows.pop(request_id, None)


class LayerThrottle:
    """Keeps the host at most one safepoint ahead of the device, which so always has a layer to run.

    A GPU is given layers long before it runs them, so without this a safepoint would be asked too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: StreamEvent | None = None

    def wait(self) -> None:
        """Wait until the device has done the work that it had been given at the last call. A CPU never waits.

        Raises:
            Stalled: The device did not get there in time.
        """
        event = StreamEvent(self._device)
        if self._last is not None:
            self._last.wait("a layer")
        self._last = event


class LayerPreemption:
    """The strategy of steps that rows may leave between two layers, or where rows that left go on.

    ``must_leave`` returns the requests whose rows must leave the running step, if they are preemptible. It is asked
    before every layer whose number is a multiple of ``every``, but the first.
    """

    def __init__(self, loop: LayerLoop, *, keep: bool, every: int, must_leave: Callable[[], Set[str]]) -> None:
        self._loop, self._every, self.must_leave = loop, every, must_leave
        self.halted = HaltedRows(keep=keep)
        """Rows that left a step until a later one goes on with them."""

    def hooks(self, plan: StepPlan) -> StepHooks | None:
        """Return the safepoints of a step; None: no row leaves it or goes on in it."""
        if self.halted.rows:
            self.halted.forget(chunk.request_id for chunk in plan.chunks if not chunk.from_layer)
        if not plan.stops and not any(chunk.from_layer for chunk in plan.chunks):
            return None
        return Safepoints(plan, loop=self._loop, halted=self.halted, every=self._every, must_leave=self.must_leave)

    def forget(self, request_id: str) -> None:
        """Drop the rows of a request that has ended."""
        self.halted.forget([request_id])


class Safepoints(StepHooks):
    """Knows the rows of a step at each layer: preemptible rows may leave before it, and others go on there."""

    stops = True

    def __init__(
        self, plan: StepPlan, *, loop: LayerLoop, halted: HaltedRows, every: int, must_leave: Callable[[], Set[str]]
    ) -> None:
        self._plan, self._loop, self._halted, self._every, self._must_leave = plan, loop, halted, every, must_leave
        self._throttle = LayerThrottle(loop.model.device)
        self.present = _until_layer(plan, 0)
        """The plan with the chunks that are at the current layer only; a new object after each change."""
        self.left: dict[str, int] = {}
        """Request -> the layer before which its chunk left the step."""
        self.fits_graphs = not any(chunk.from_layer for chunk in plan.chunks)

    def first_rows(self, plan: StepPlan) -> StepPlan:
        """Return the plan without the chunks that go on at a later layer."""
        return self.present

    def before_layer(self, run: StepRun, layer: int) -> None:
        """Let rows leave before a layer, and others go on there."""
        if not layer:
            return
        hidden_TD = run.hidden_TD
        if leaving := self.leaving(layer):
            hidden_TD = self.leave(leaving, layer, hidden_TD)
        if any(chunk.from_layer == layer for chunk in self._plan.chunks):
            hidden_TD = self._rejoin(layer, hidden_TD)
        if self.present is not run.plan:
            self._loop.change_rows(run, self.present, layer, hidden_TD)

    def finish(self, run: StepRun, output: LayersOutput) -> LayersOutput:
        """Name the chunks that left the step."""
        return dataclasses.replace(output, outcome=dataclasses.replace(output.outcome, halted=self.left))

    def leaving(self, layer: int) -> Set[str]:
        """Return the requests whose rows must leave before a layer, as planned or as asked; call it once a layer.

        On a GPU this waits until the device has come to the safepoint before. If there is none before this layer, or if
        no present row is preemptible, no one is asked.
        """
        planned = frozenset(chunk.request_id for chunk in self.present.chunks if chunk.leaves_at == layer)
        preemptible = self._plan.preemptible
        if layer % self._every or not any(chunk.request_id in preemptible for chunk in self.present.chunks):
            return planned
        self._throttle.wait()
        return planned | (preemptible & self._must_leave())

    def leave(self, leaving: Set[str], layer: int, hidden_TD: Tensor) -> Tensor:
        """Halt the leaving chunks before this layer, leave out those that would go on later; return the other rows.

        ``hidden_TD`` are the present rows, ``[T, D]``.
        """
        kept: list[Tensor] = []
        row = 0
        for chunk in self.present.chunks:
            rows_TD = hidden_TD[row : row + len(chunk.token_ids)]
            row += len(chunk.token_ids)
            if chunk.request_id in leaving:
                self.left[chunk.request_id] = self._halted.halt(chunk, layer, rows_TD)
            else:
                kept.append(rows_TD)
        later = (c for c in self._plan.chunks if c.from_layer >= layer and c.request_id in leaving)
        self.left |= {chunk.request_id: chunk.from_layer for chunk in later}  # their rows stay in HaltedRows
        self.present, self._plan = _without(self.present, self.left), _without(self._plan, self.left)
        return torch.cat([*kept, hidden_TD[row:]])

    def _rejoin(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Insert the rows that left an earlier step before this layer, behind the other device rows."""
        self.present = _until_layer(self._plan, layer)
        back = [self._halted.take(chunk) for chunk in self.present.chunks if chunk.from_layer == layer]
        n = sum(len(chunk.token_ids) for chunk in self.present.chunks) - sum(map(len, back))
        return torch.cat([hidden_TD[:n], *back, hidden_TD[n:]])


def _until_layer(plan: StepPlan, layer: int) -> StepPlan:
    """Return a plan with only the chunks at a layer: those that began before it, then those that go on there."""
    chunks = sorted((c for c in plan.chunks if c.from_layer <= layer), key=lambda chunk: chunk.from_layer)
    return dataclasses.replace(plan, chunks=tuple(chunks))


def _without(plan: StepPlan, request_ids: Iterable[str]) -> StepPlan:
    """Return a plan without the chunks of some requests."""
    left_out = set(request_ids)
    return dataclasses.replace(plan, chunks=tuple(c for c in plan.chunks if c.request_id not in left_out))

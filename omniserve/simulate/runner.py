"""SimulatedRunner: what the engine's stepper drives in a simulation; it moves a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from omniserve.core.plan import DeviceChunk, SampledToken, StepOutput, StepPlan, without_missed
from omniserve.core.work import (
    CancelPrefill,
    CancelTask,
    HostEvent,
    KVMove,
    RemotePrefill,
    SideWork,
    SlotCopy,
    StateLoad,
)
from omniserve.latency import BatchFeatures, features_of
from omniserve.simulate.host_tier import SimulatedHostTier, stage_of
from omniserve.simulate.machine import TOKEN, Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step's time and contents, for reports."""

    plan: StepPlan
    start_s: float
    seconds: float


class PrefillPeers(Protocol):
    """Prefill engines as the runner sees them (``SimulatedPrefillEngines``)."""

    def ask(self, prefill: RemotePrefill, at_s: float) -> None:
        """Ask one for a prompt."""
        ...

    def cancel(self, cancel: CancelPrefill, at_s: float) -> None:
        """Stop a prefill whose request has ended; it has its event all the same."""
        ...

    def poll(self, now_s: float) -> list[HostEvent]:
        """Return what has come from them by now."""
        ...

    def next_event_s(self, now_s: float) -> float:
        """Return when something may come next, now that nothing more is asked for at this time; infinity: never."""
        ...


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way."""

    output: StepOutput
    end_s: float
    features: BatchFeatures = field(default_factory=BatchFeatures)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Passage:
    """A step on its way through the stages of the model."""

    begins_s: Sequence[float]
    """When it begins in each stage."""
    ends_s: Sequence[float]
    layer_s: float
    num_layers: int

    def reaches_s(self, layer: int) -> float:
        """Return when it reaches a layer."""
        stage = stage_of(layer, self.num_layers, len(self.ends_s))
        return self.begins_s[stage] + (layer - -(-self.num_layers * stage // len(self.ends_s))) * self.layer_s

    def stage_ends_s(self, layer: int) -> float:
        """Return when it leaves the stage of a layer."""
        return self.ends_s[stage_of(layer, self.num_layers, len(self.ends_s))]


_layer = attrgetter("layer")
_TOKEN = (SampledToken(token_id=TOKEN),)


@dataclass(frozen=True, slots=True)
class Chances:
    """What is drawn at random in a simulation."""

    seed: int
    noise: float = 0.0
    """Standard deviation of the logarithm of what a step takes over what it takes otherwise; the mean stays."""
    drafts_right: float = 0.0
    """How often a draft is right; 0: no request has drafts."""


class SimulatedRunner:
    """Runs steps on a virtual clock: a machine says what they take, and tokens are invented.

    Args:
        machine: How long everything takes.
        tier: Its host tier, if it has one.
        prefills: Prefill engines that it asks, if there are any.
        num_stages: Stages of the model. Each step passes all of them, and each has one step at a time: the layers are
            shared out evenly, and the last stage has what a step takes besides.
        chances: The noise of its steps, and the seed of that and of the machine's spread.
        keeps_halted: Rows that left a step go on from the layer where they left it.
        safepoint_every: Number of layers from one safepoint to the next.
        must_leave: Asked at safepoints, with the times of the last and of this question, for the requests whose
            preemptible rows must leave the step for one that came in between; None: they never do.
    """

    def __init__(
        self,
        machine: Machine,
        tier: SimulatedHostTier | None,
        chances: Chances,
        *,
        prefills: PrefillPeers | None = None,
        num_stages: int = 1,
        keeps_halted: bool,
        safepoint_every: int,
        must_leave: Callable[[float, float], Set[str]] | None,
    ) -> None:
        self._machine = machine
        self._tier = tier
        self._prefills = prefills
        self._executors: dict[type[SideWork], Callable[[Any, float], None]] = {
            work: _takes_no_time for work in (CancelTask, SlotCopy, StateLoad)
        }
        if tier is not None:
            self._executors[KVMove] = tier.start_move
        if prefills is not None:
            self._executors |= {RemotePrefill: prefills.ask, CancelPrefill: prefills.cancel}
        self._free_s = [0.0] * num_stages
        """Time at which each stage has done the step that was launched last, seconds."""
        self._shape = machine.shape
        self._noise = chances.noise
        self._rng = random.Random(chances.seed)
        spread_rng = random.Random(f"{chances.seed} spread")
        self._draw = machine.spread.draws(spread_rng) if machine.spread is not None else None
        self._keeps_halted, self._safepoint_every = keeps_halted, safepoint_every
        self._must_leave = must_leave
        self.now_s = 0.0
        """The virtual clock."""
        self.host_works = False
        self.features = BatchFeatures()
        """The features of the step that was collected last, of those that computed something."""
        self.seconds = 0.0
        """The seconds that this step took, without waiting for others."""

    def poll_host(self) -> list[HostEvent]:
        """Return the events of the host tier and of prefill engines up to now."""
        events = self._tier.poll(self.now_s) if self._tier is not None else []
        return events if self._prefills is None else events + self._prefills.poll(self.now_s)

    def next_event_s(self) -> float:
        """Return when the next of these events may come if nothing is launched; infinity: never."""
        from_host = self._tier.next_event_s() if self._tier is not None else None
        from_peers = self._prefills.next_event_s(self.now_s) if self._prefills is not None else math.inf
        return from_peers if from_host is None else min(from_host, from_peers)

    def launch(self, plan: StepPlan) -> _Launched:
        """Begin a step. An empty plan takes no time."""
        start_s = self.now_s
        for work in plan.work:
            self._executors[type(work)](work, start_s)
        if plan.is_empty:
            return _Launched(StepOutput(), start_s)
        has_host_rows = bool(plan.entries or plan.joins or plan.pipelined)
        self.host_works = has_host_rows or (self._tier is not None and self._tier.attends)
        self.features = features_of(plan, self._shape, host_works=self.host_works)
        factor = self._factor()
        self.seconds, halted = self._take(plan, factor)
        missed = self._missed(plan)
        plan = without_missed(plan, missed)
        if missed and not plan.chunks:  # only the layers where rows join were run
            self.features = features_of(plan, self._shape, host_works=self.host_works)
            self.seconds, halted = self._take(plan, factor)
        passage = self._passage(start_s)
        self._free_s = [*passage.ends_s]
        if self._tier is not None:
            self._tier.submit(plan, passage.reaches_s if self._machine.late_layers else passage.stage_ends_s)
        last_layer = self._machine.spec.num_layers - 1
        tokens = {
            chunk.request_id: _tokens(chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :])
            for chunk in plan.chunks
            if chunk.samples and chunk.request_id not in halted
        }
        tokens.update((join.request_id, _tokens(join.draft_ids)) for join in plan.joins if join.layer == last_layer)
        tokens.update((row.request_id, _tokens(())) for row in plan.pipelined)
        return _Launched(
            StepOutput(tokens=tokens, halted=halted, missed=missed), passage.ends_s[-1], self.features, self.seconds
        )

    def _passage(self, start_s: float) -> _Passage:
        """Return when a step that takes ``self.seconds`` is in each stage."""
        num_layers, num_stages = self._machine.spec.num_layers, len(self._free_s)
        if num_stages == 1:
            return _Passage([start_s], [start_s + self.seconds], self.seconds / num_layers, num_layers)
        terms = self._machine.device.terms(self.features)
        layers_s = self.seconds * sum(terms[self._machine.device.layer_terms]) / sum(terms)
        at_s, begins_s, ends_s = start_s, list[float](), list[float]()
        for stage in range(num_stages):
            besides_s = self.seconds - layers_s if stage == num_stages - 1 else 0.0
            begins_s.append(max(at_s, self._free_s[stage]))
            at_s = begins_s[-1] + layers_s / num_stages + besides_s
            ends_s.append(at_s)
        return _Passage(begins_s, ends_s, layers_s / num_layers, num_layers)

    def _missed(self, plan: StepPlan) -> frozenset[str]:
        """Return the requests of joins whose results are not there when the step reaches their layer."""
        if not plan.joins:
            return frozenset()
        passage = self._passage(self.now_s)
        missed: set[str] = set()
        for layer, joins in itertools.groupby(sorted(plan.joins, key=_layer), key=_layer):
            at_s = passage.reaches_s(layer)
            here = list(joins)
            late = [join for join in here if not join.is_ready]
            assert self._tier is not None
            absent = [join for join in late if not self._tier.has_result(join, at_s)]
            away = here if plan.joins_as_one and absent else absent
            missed.update(join.request_id for join in away)
            for join in late:
                if join not in away:
                    self._tier.use_result(join)
        return frozenset(missed)

    def collect(self, step: _Launched) -> StepOutput:
        """Let the time pass in which a launched step ends, and return its output."""
        self.now_s = max(self.now_s, step.end_s)
        if step.seconds:
            self.features, self.seconds = step.features, step.seconds
        return step.output

    def forget(self, request_id: str) -> None:
        """Drop what the host tier keeps of a request, which has ended."""
        if self._tier is not None:
            self._tier.forget(request_id)

    def _factor(self) -> float:
        """Draw what the step's time is multiplied by."""
        factor = math.exp(self._rng.gauss(-(self._noise**2) / 2, self._noise)) if self._noise else 1.0
        return factor * self._draw(self._machine.device.step_s(self.features)) if self._draw is not None else factor

    def _take(self, plan: StepPlan, factor: float) -> tuple[float, dict[str, int]]:
        """Return the seconds of a step, and the layers that chunks left it before."""
        if plan.stops or any(chunk.from_layer for chunk in plan.chunks):
            return self._layer_by_layer(plan, factor)
        return factor * self._machine.device.step_s(self.features), {}

    def _layer_by_layer(self, plan: StepPlan, factor: float) -> tuple[float, dict[str, int]]:
        """Return the same of a step that rows leave or enter between two layers (conserve 4.3).

        Each layer takes its share of a step that consists of the rows that are there.
        """
        halted: dict[str, int] = {}
        preemptible = plan.preemptible
        looked_s = time_s = self.now_s
        num_layers, layer_s = self._machine.spec.num_layers, 0.0
        present: tuple[DeviceChunk, ...] = ()
        for layer in range(num_layers):
            is_safepoint = layer % self._safepoint_every == 0
            if self._must_leave is not None and layer and is_safepoint and preemptible - halted.keys():
                left, leaving = layer if self._keeps_halted else 0, self._must_leave(looked_s, time_s)
                for chunk in plan.chunks:
                    if chunk.request_id in preemptible & leaving - halted.keys():
                        # A row that would have gone on at this layer or later stays where it is.
                        halted[chunk.request_id] = chunk.from_layer if chunk.from_layer >= layer else left
            looked_s = time_s if is_safepoint else looked_s
            if layer:
                halted |= {
                    c.request_id: layer for c in plan.chunks if c.leaves_at == layer and c.request_id not in halted
                }
            chunks = tuple(c for c in plan.chunks if c.from_layer <= layer and c.request_id not in halted)
            if chunks != present or not layer:
                present = chunks
                part = dataclasses.replace(plan, chunks=chunks)
                features = features_of(part, self._shape, host_works=self.host_works)
                layer_s = factor * self._machine.device.step_s(features) / num_layers
            time_s += layer_s
        return time_s - self.now_s, halted


def _takes_no_time(work: SideWork, at_s: float) -> None:
    """Begin side work that ends at once; a cancelled task is worked on all the same."""


def _tokens(draft_ids: Sequence[int]) -> tuple[SampledToken, ...]:
    """Return the tokens that a row brings with these drafts: one for itself, and one for each that is right."""
    if not draft_ids:
        return _TOKEN
    from omniserve.simulate.drafter import num_right

    return _TOKEN * (1 + num_right(draft_ids))

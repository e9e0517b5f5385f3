"""SimulatedRunner: what the engine's stepper drives in a simulation; it moves a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter

from omniserve.core.plan import HostEvent, SampledToken, StepOutput, StepPlan, without_missed
from omniserve.latency import BatchFeatures, features_of
from omniserve.simulate.drafter import TOKEN, num_right
from omniserve.simulate.host_tier import SimulatedHostTier
from omniserve.simulate.machine import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step's time and contents, for reports."""

    plan: StepPlan
    start_s: float
    seconds: float


_layer = attrgetter("layer")
_TOKEN = (SampledToken(token_id=TOKEN),)


class SimulatedRunner:
    """Runs steps on a virtual clock: a machine says what they take, and tokens are invented.

    Args:
        machine: How long everything takes.
        tier: Its host tier, if it has one.
        noise: Standard deviation of the logarithm of what a step takes over what it takes otherwise; the mean stays.
        seed: Of the noise and of the machine's spread.
        keeps_halted: Rows that left a step go on from the layer where they left it.
        must_leave: Asked between two layers, with the times of the last and of this question, for the requests whose
            preemptible rows must leave the step for one that came in between.
    """

    def __init__(
        self, machine: Machine, tier: SimulatedHostTier | None, *, noise: float, seed: int, keeps_halted: bool,
        must_leave: Callable[[float, float], Set[str]],
    ) -> None:  # fmt: skip
        self._machine = machine
        self._tier = tier
        self._shape = machine.shape
        self._noise = noise
        self._rng = random.Random(seed)
        self._draw = machine.spread.draws(random.Random(f"{seed} spread")) if machine.spread is not None else None
        self._keeps_halted = keeps_halted
        self._must_leave = must_leave
        self.now_s = 0.0
        """The virtual clock."""
        self.host_works = False
        self.features = BatchFeatures()
        """The features of the last step that computed something."""
        self.seconds = 0.0
        """The seconds that this step took."""

    def poll_host(self) -> list[HostEvent]:
        """Return the events of the host tier up to now."""
        return self._tier.poll(self.now_s) if self._tier is not None else []

    def launch(self, plan: StepPlan) -> StepOutput:
        """Let the time of a step pass, and return its output; an empty plan takes none."""
        start_s = self.now_s
        if self._tier is not None:
            self._tier.start_moves(plan, start_s)
        if plan.is_empty:
            return StepOutput()
        has_host_rows = bool(plan.entries or plan.joins or plan.pipelined)
        self.host_works = has_host_rows or (self._tier is not None and self._tier.attends)
        self.features = features_of(plan, self._shape, host_works=self.host_works)
        self.seconds, halted = self._take(plan)
        missed = self._missed(plan)
        plan = without_missed(plan, missed)
        if missed and not plan.chunks:  # only the layers where rows join were run
            self.features = features_of(plan, self._shape, host_works=self.host_works)
            self.seconds, halted = self._take(plan)
        if self._tier is not None:
            self._tier.submit(plan, start_s, self.seconds, during_step=self._machine.late_layers > 0)
        self.now_s = start_s + self.seconds
        last_layer = self._machine.spec.num_layers - 1
        tokens = {
            chunk.request_id: _tokens(chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :])
            for chunk in plan.chunks
            if chunk.samples and chunk.request_id not in halted
        }
        tokens.update((join.request_id, _tokens(join.draft_ids)) for join in plan.joins if join.layer == last_layer)
        tokens.update((row.request_id, _tokens(())) for row in plan.pipelined)
        return StepOutput(tokens=tokens, halted=halted, missed=missed)

    def _missed(self, plan: StepPlan) -> frozenset[str]:
        """Return the requests of joins whose results are not there when the step reaches their layer."""
        layer_s = self.seconds / self._machine.spec.num_layers
        missed: set[str] = set()
        for layer, joins in itertools.groupby(sorted(plan.joins, key=_layer), key=_layer):
            at_s = self.now_s + layer * layer_s
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

    def collect(self, step: StepOutput) -> StepOutput:
        """Return the output of a launched step."""
        return step

    def forget(self, request_id: str) -> None:
        """Drop what the host tier keeps of a request, which has ended."""
        if self._tier is not None:
            self._tier.forget(request_id)

    def _take(self, plan: StepPlan) -> tuple[float, dict[str, int]]:
        """Return the seconds of a step, and the layers that chunks left it before."""
        factor = math.exp(self._rng.gauss(-(self._noise**2) / 2, self._noise)) if self._noise else 1.0
        step_s = self._machine.device.step_s(self.features)
        if self._draw is not None:
            factor *= self._draw(step_s)
        if plan.preemptible or any(chunk.from_layer for chunk in plan.chunks):
            return self._layer_by_layer(plan, factor)
        return factor * step_s, {}

    def _layer_by_layer(self, plan: StepPlan, factor: float) -> tuple[float, dict[str, int]]:
        """Return the same of a step that rows leave or enter between two layers (conserve 4.3).

        Each layer takes its share of a step that consists of the rows that are there.
        """
        halted: dict[str, int] = {}
        looked_s = time_s = self.now_s
        num_layers, layer_s, present = self._machine.spec.num_layers, 0.0, -1
        for layer in range(num_layers):
            if layer and plan.preemptible - halted.keys():
                left, leaving = layer if self._keeps_halted else 0, self._must_leave(looked_s, time_s)
                for chunk in plan.chunks:
                    if chunk.request_id in plan.preemptible & leaving - halted.keys():
                        # A row that would have gone on at this layer or later stays where it is.
                        halted[chunk.request_id] = chunk.from_layer if chunk.from_layer >= layer else left
            looked_s = time_s
            chunks = tuple(c for c in plan.chunks if c.from_layer <= layer and c.request_id not in halted)
            if len(chunks) != present:
                present = len(chunks)
                part = dataclasses.replace(plan, chunks=chunks)
                features = features_of(part, self._shape, host_works=self.host_works)
                layer_s = factor * self._machine.device.step_s(features) / num_layers
            time_s += layer_s
        return time_s - self.now_s, halted


def _tokens(draft_ids: Sequence[int]) -> tuple[SampledToken, ...]:
    """Return the tokens that a row brings with these drafts: one for itself, and one for each that is right."""
    return _TOKEN * (1 + num_right(draft_ids)) if draft_ids else _TOKEN

"""Planned deferral: rows of lower classes pass some layers of a step, and the next ones in later steps.

With ``defer_tokens`` (off by default) a step is planned with layers at which rows of lower classes leave it. They go on
there in the next step, so that a token of theirs is spread over several steps, each of which has fewer of their rows in
a layer. A higher class's next token then comes sooner. What Deferral does for a request that has just come is another
matter: its rows leave a step that runs already.

Paper: omniserve 6 (multiple priority levels): "the computation for low-priority requests can be partially deferred at a
given layer and then piggybacked onto the execution of the same layer several iterations later, with the deferral
interval determined by the corresponding SLO requirement", for shorter times per token of high-priority requests.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omniserve.sched.batch import Batch
from omniserve.sched.features.halted_chunks import halted_chunk
from omniserve.sched.options import CoServingOptions
from omniserve.sched.state import BE, LS, RequestState
from omniserve.sched.step_cost import LS_HEADROOM, Forecast, StepCost, next_token_due_s, tpot_bound
from omniserve.sched.view import RequestView


@dataclass(frozen=True, slots=True)
class _Part:
    """Decode rows that are in a step in the same layers."""

    first: int
    """The first of these layers."""
    stop: int
    """The layer before which they leave; the number of layers: they do not."""
    num_rows: int
    num_tokens: int
    """Tokens of all of them that have their KV."""
    keys_seen: float


class PlannedDeferral:
    """Chooses the layers at which rows of lower classes leave a step.

    A row of a lower LS class leaves if the rest of its layers can be passed in later steps, and its token is still in
    time: after ``layers left / steps until it is due`` layers, where a step may be as long as the TPOT of the higher
    class lets it be. A request without a TPOT stays: nothing says when its token is due.

    Best-effort rows are bounded by the time that LS requests leave them, so they make no token late. With ``always``
    they leave beside decodes of LS requests with a TPOT, after an even share of their layers; the prediction of such a
    step counts them as if they stayed.
    """

    def __init__(self, view: RequestView, forecast: Forecast, options: CoServingOptions) -> None:
        self._view, self._host, self._forecast, self._slack = view, view.host, forecast, options.slack
        self._always, self._most_steps = options.defer_tokens == "always", options.most_token_steps
        self._num_layers = view.limits.num_layers

    def defer_decodes(self, batch: Batch, begin_s: float) -> None:
        """Let decodes of lower LS classes leave a batch that has all LS decodes and nothing else.

        The cost of the batch is then that of the rows in the layers that they pass.
        """
        decodes = [state for state in self._view.device[LS] if state in batch]
        ranks = [state.priority_key[0] for state in decodes if state.slo.tpot_s is not None]
        if batch.cost is None or not ranks:
            return
        highest = min(ranks)
        lower = [state for state in decodes if state.priority_key[0] > highest and self._may_leave(state)]
        higher = [state for state in decodes if not (state.priority_key[0] > highest and self._may_leave(state))]
        going_on = [state for state in higher if self._first_layer(state)]  # they pass the rest of their layers
        whole = self._cost_of(state for state in higher if not self._first_layer(state))
        bound_s = tpot_bound(higher, begin_s, self._slack, LS_HEADROOM).seconds
        ends = {state.request_id: self._num_layers for state in (*going_on, *lower)}
        step_s = self._seconds(whole, [*going_on, *lower], ends)
        if lower and (self._always or step_s > bound_s):
            each_s = max(step_s, min((1 - LS_HEADROOM) * s.slo.tpot_s for s in higher if s.slo.tpot_s is not None))
            earliest = {state.request_id: self._earliest_end(state, each_s, begin_s) for state in lower}
            last = len(lower) if self._always else self._fewest(whole, going_on, lower, earliest, bound_s)
            # The lowest class and the youngest of it leave first.
            ends |= {state.request_id: earliest[state.request_id] for state in lower[len(lower) - last :]}
        for state in lower:
            self._leave(batch, state, ends[state.request_id])
        partial = [state for state in (*going_on, *lower) if self._is_partial(state, ends[state.request_id])]
        if partial and len(partial) == len(decodes):  # what they share in each layer is to be counted once
            longest = max(partial, key=lambda s: ends[s.request_id] - self._first_layer(s))
            partial = [state for state in partial if state is not longest]
        if partial:
            away = {state.request_id for state in partial}
            whole = self._cost_of(state for state in decodes if state.request_id not in away)
            batch.cost.replace(whole, beside_s=self._seconds(whole, partial, ends) - whole.seconds())

    def defer_best_effort(self, batch: Batch) -> None:
        """Let best-effort rows leave a batch that is complete, with ``always`` and beside LS decodes with a TPOT."""
        decodes = (state for state in self._view.device[LS] if state in batch and state.decodes)
        if not self._always or all(state.slo.tpot_s is None for state in decodes):
            return
        for state in self._view.device[BE]:
            if state in batch:
                self._leave(batch, state, self._first_layer(state) + -(-self._num_layers // self._most_steps))

    def _fewest(
        self,
        whole: StepCost,
        going_on: Sequence[RequestState],
        lower: Sequence[RequestState],
        earliest: dict[str, int],
        bound_s: float,
    ) -> int:
        """Return how many of the lower classes' requests, the last first, leave for a step within the bound.

        All of them, if even that is not enough.
        """

        def seconds(count: int) -> float:
            stay = len(lower) - count
            ends = {s.request_id: self._num_layers for s in (*going_on, *lower[:stay])}
            ends |= {s.request_id: earliest[s.request_id] for s in lower[stay:]}
            return self._seconds(whole, [*going_on, *lower], ends)

        low, high = 0, len(lower)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if seconds(middle) <= bound_s else (middle, high)
        return high

    def _earliest_end(self, state: RequestState, step_s: float, begin_s: float) -> int:
        """Return the first layer before which a request's row may leave, if later steps take ``step_s`` each."""
        first = self._first_layer(state)
        left = self._num_layers - first
        num_steps = math.floor(next_token_due_s(state, begin_s, self._slack) / step_s) if step_s > 0 else 1
        # Of a token that is under way some steps are behind it already.
        most = max(1, self._most_steps - first * self._most_steps // self._num_layers)
        return first + -(-left // min(max(num_steps, 1), most))

    @staticmethod
    def _may_leave(state: RequestState) -> bool:
        """Return whether it is known when the next token of a decode is due."""
        return state.slo.tpot_s is not None and state.first_token_s is not None

    @staticmethod
    def _first_layer(state: RequestState) -> int:
        halted = halted_chunk(state)
        return halted.layer if halted is not None else 0

    def _is_partial(self, state: RequestState, end: int) -> bool:
        return self._first_layer(state) > 0 or end < self._num_layers

    def _leave(self, batch: Batch, state: RequestState, end: int) -> None:
        """Have the rows of a request leave before a layer, unless there is none."""
        if end < self._num_layers:
            batch.replace(dataclasses.replace(batch.chunk(state), leaves_at=end))

    # -- time ------------------------------------------------------------------------------------------------------

    def _cost_of(self, decodes: Iterable[RequestState]) -> StepCost:
        """Return a step of some decodes."""
        cost = self._forecast.step(host_works=self._host.is_busy)
        for state in decodes:
            cost.add_chunk(state.num_computed_tokens, state.num_uncomputed_tokens, samples=1)
        return cost

    def _seconds(self, whole: StepCost, partial: Iterable[RequestState], ends: dict[str, int]) -> float:
        """Return what a step takes with the rows of ``whole`` in all layers, and others in some.

        Each layer takes its share of a step that consists of the rows that are there.
        """
        shape, grouped = self._forecast.shape, defaultdict[tuple[int, int], list[RequestState]](list)
        for state in partial:
            grouped[self._first_layer(state), ends[state.request_id]].append(state)
        parts = []
        for (first, end), states in grouped.items():
            contexts = [state.num_computed_tokens for state in states]
            keys = sum(shape.keys_seen(context, 1) for context in contexts)
            parts.append(_Part(first, end, len(states), sum(contexts), keys))
        borders = sorted({0, self._num_layers, *(layer for part in parts for layer in (part.first, part.stop))})
        seconds = 0.0
        for begin, end in itertools.pairwise(borders):
            cost = whole.copy()
            for part in parts:
                if part.first <= begin and end <= part.stop:
                    cost.add_decodes(part.num_rows, part.num_tokens, part.keys_seen, samples=part.num_rows)
            seconds += cost.seconds() * (end - begin) / self._num_layers
        return seconds

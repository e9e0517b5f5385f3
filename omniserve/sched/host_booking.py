"""HostBooking: what steps do with the rows of the host tier, booked when a step is launched and when its outcome comes.

A step that is launched ahead of another one's outcome is booked as if its late joins joined; ``settle`` corrects it,
and yields the tokens that have passed the last layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from omniserve.core.plan import PENDING_TOKEN, PiggybackEntry, PiggybackJoin, StepOutput, StepPlan
from omniserve.sched.away_tokens import AssumedJoin, AwayTokens
from omniserve.sched.state import RequestState


class PassedRow(NamedTuple):
    """A host row whose token has passed all layers."""

    state: RequestState
    row: PiggybackEntry | PiggybackJoin
    is_lost: bool
    """Its host attention has failed in the step: the request must be recomputed."""


class HostBooking:
    """Books host rows; ``states`` has all unfinished requests."""

    def __init__(self, tokens: AwayTokens, states: Mapping[str, RequestState], *, num_layers: int) -> None:
        self._tokens, self._states, self._last = tokens, states, num_layers - 1
        self._assumed: dict[int, list[tuple[AssumedJoin, PiggybackJoin]]] = {}
        """Late joins that a step in flight is assumed to take, by its id."""

    def is_certain(self, plan: StepPlan) -> bool:
        """Tell whether it is known before the step has run which tokens pass all layers in it."""
        if plan.pipelined:
            return False
        doubtful = plan.doubtful
        return not (doubtful and any(join.request_id in doubtful and join.layer == self._last for join in plan.joins))

    def book(self, plan: StepPlan, output: StepOutput | None) -> Iterator[PassedRow]:
        """Book where tokens are after a step, and yield the rows that have passed all layers.

        Args:
            output: The step's outcome; None: it is not known yet, and late joins are assumed to join.
        """
        assumed = plan.doubtful if output is None else frozenset()
        output = output or StepOutput()
        tokens, states, has_device_rows = self._tokens, self._states, bool(plan.chunks)
        if not plan.is_empty:
            tokens.count_step(plan.joins, has_device_rows=has_device_rows)
        for entry in plan.entries:
            tokens.enter(states[entry.request_id], entry.position, entry.draft_ids)
        for join in plan.joins:
            state = states[join.request_id]
            if join.request_id in output.missed:
                tokens.miss(state, has_device_rows=has_device_rows)
            elif join.request_id in assumed:
                joins = self._assumed.setdefault(plan.step_id, [])
                joins.append((tokens.assume(state, join.draft_ids, has_device_rows=has_device_rows), join))
            elif tokens.advance(state, join.draft_ids, has_device_rows=has_device_rows):
                yield PassedRow(state, join, is_lost=False)
        for row in plan.pipelined:
            state = states[row.request_id]
            tokens.arrive(state)
            yield PassedRow(state, row, is_lost=row.request_id in output.lost)

    def settle(self, plan: StepPlan, output: StepOutput) -> Iterator[PassedRow]:
        """Book which joins a step has taken of those that it was assumed to; yield the rows that passed all layers."""
        for assumed, join in self._assumed.pop(plan.step_id, ()):
            if self._tokens.settle(assumed, joined=join.request_id not in output.missed):
                yield PassedRow(assumed.state, join, is_lost=False)

    def refresh(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the tokens that have come since it was made, of requests that are still there.

        Joins of tokens that have not come to their layer are left out.
        """
        states, is_at, has_chunks = self._states, self._tokens.is_at, bool(plan.chunks)
        return dataclasses.replace(
            plan,
            entries=tuple(self._with_token(entry) for entry in plan.entries if entry.request_id in states),
            joins=tuple(join for join in plan.joins if is_at(join)),
            pipelined=tuple(
                # Without device rows there is no first sub-batch.
                dataclasses.replace(self._with_token(row), is_hybrid=row.is_hybrid and has_chunks)
                if isinstance(row, PiggybackEntry)
                else row
                for row in plan.pipelined
                if row.request_id in states
            ),
        )

    def _with_token(self, row: PiggybackEntry) -> PiggybackEntry:
        if row.token_id != PENDING_TOKEN:
            return row
        return dataclasses.replace(row, token_id=self._states[row.request_id].token_ids[row.position])

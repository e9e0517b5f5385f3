"""Drafts: decodes are followed by guesses at their next tokens, which the step verifies (``draft_rows.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from omniserve.core.plan import DeviceChunk, StepOutput, StepPlan
from omniserve.core.request import RequestOutput
from omniserve.sched.features.base import FeatureContext, OpenStep, Row, StepFeature
from omniserve.sched.features.draft_rows import with_drafts
from omniserve.sched.features.drafter import prompt_lookup
from omniserve.sched.features.host_draft_rows import with_host_drafts
from omniserve.sched.features.speculation import Speculation, speculation_of
from omniserve.sched.state import Phase, RequestState


class Drafts(StepFeature):
    """Adds drafts to the steps of requests that are decoded speculatively, and books which of them were right."""

    def __init__(self, context: FeatureContext) -> None:
        self._kv, self._limits, self._counters = context.kv, context.limits, context.counters
        self._drafter_of = context.settings.drafter_of or prompt_lookup

    def on_arrival(self, state: RequestState) -> None:
        if self._limits.is_speculative(state.request):
            state.facts[Speculation] = Speculation(self._drafter_of(state.request_id, state.request))

    def complete(self, step: OpenStep) -> None:
        """Let decodes carry drafts, in the memory, seats and time that are left.

        Those of the device come first: they are verified at once.
        """
        states = [step.states[request_id] for request_id in step.chunks]
        if any(Speculation in state.facts for state in states):
            step.chunks |= with_drafts(
                tuple(step.chunks.values()),
                states,
                self._kv,
                cost=step.cost,
                bound_s=step.bound_s,
                tokens_left=step.tokens_left,
                max_model_len=self._limits.max_model_len,
            )
        if self._limits.max_host_drafts and self._may_have_drafts(step):
            step.host_rows = with_host_drafts(step, self._kv, self._limits)

    def _may_have_drafts(self, step: OpenStep) -> bool:
        ids = [entry.request_id for entry in step.host_rows.entries] + [
            join.request_id for join in step.host_rows.joins
        ]
        return any([Speculation in step.states[request_id].facts for request_id in ids])

    def is_certain(self, plan: StepPlan) -> bool:
        last = self._limits.num_layers - 1
        return not (
            any(chunk.num_drafts for chunk in plan.chunks)
            or any(join.draft_ids and join.layer == last for join in plan.joins)
        )

    def awaits_tokens(self, states: Iterable[RequestState]) -> bool:
        """Tell whether a request could have drafts then: its drafter knows the token in flight, and what follows."""
        return any(
            (speculation := speculation_of(state)) is not None
            and state.num_pending_tokens == 1
            and speculation.knows_next(state.token_ids, state.num_tokens - 1)
            for state in states
        )

    def takes_outcome(self, state: RequestState, row: Row, output: StepOutput) -> bool:
        """Book a row whose drafts may have spoilt its logits: the next one, without drafts, tells whether they had."""
        if state.request_id not in output.unverified:
            return False
        state.facts.pop(Speculation, None)
        if isinstance(row, DeviceChunk):
            self._kv.trim(state.request_id, state.num_tokens)
        elif state.phase is Phase.HOST:
            self._kv.trim(state.request_id, state.num_computed_tokens + 1)
        return True

    def on_computed(
        self, state: RequestState, row: Row, output: StepOutput, expect_token: Callable[[RequestState], None]
    ) -> None:
        """Book which drafts of a row were right, and take back what the others have taken; without tokens none was."""
        num_right = max(0, len(output.tokens.get(state.request_id, ())) - 1)
        if not isinstance(row, DeviceChunk):
            state.num_computed_tokens += num_right
        elif not row.num_drafts:
            return
        else:
            state.num_computed_tokens -= row.num_drafts - num_right
        for _ in range(num_right):
            expect_token(state)
        if isinstance(row, DeviceChunk):
            needs_trim = num_right < row.num_drafts and state.phase is Phase.DEVICE
        else:
            needs_trim = Speculation in state.facts and state.phase is Phase.HOST
        if needs_trim:
            self._kv.trim(state.request_id, state.num_computed_tokens)

    def on_output(self, state: RequestState, row: Row, output: RequestOutput, num_sampled: int) -> RequestOutput:
        num_drafts = row.num_drafts if isinstance(row, DeviceChunk) else len(row.draft_ids)
        if not num_drafts:
            return output
        num_accepted = 0
        if num_sampled:
            speculation, num_right = speculation_of(state), num_sampled - 1
            assert speculation is not None, f"{state.request_id} had drafts, but nothing that makes them"
            speculation.learn(num_drafts, num_right)
            num_accepted = min(num_right, len(output.new_token_ids))
        self._counters["accepted_drafts"] += num_accepted
        self._counters["rejected_drafts"] += num_drafts - num_accepted
        return dataclasses.replace(
            output, num_accepted_drafts=num_accepted, num_rejected_drafts=num_drafts - num_accepted
        )

    def discount(self, output: RequestOutput, left: RequestOutput) -> None:
        num_rejected = output.num_accepted_drafts - left.num_accepted_drafts
        self._counters["accepted_drafts"] -= num_rejected
        self._counters["rejected_drafts"] += num_rejected

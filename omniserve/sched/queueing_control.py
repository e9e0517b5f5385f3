"""QueueingControl: what LS requests may expect, and what BE work must leave them, by the queue of LS requests.

Paper: omniserve 3.3.3 (admission), 3.3.4 (bounds); ``ttft.py`` predicts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from omniserve.sched.admission import Admission
from omniserve.sched.admittable import (
    UNKNOWN_MAX_TOKENS,
    UNKNOWN_PROMPT_TOKENS,
    admittable_per_s,
    earlier_ones,
    made_up,
)
from omniserve.sched.batch import Batch
from omniserve.sched.deadlines import Deadlines
from omniserve.sched.options import CoServingOptions
from omniserve.sched.overtaking import Overtaking
from omniserve.sched.prefill_order import ahead_of
from omniserve.sched.prefixes_on_host import Coming
from omniserve.sched.state import BE, LS, RequestState
from omniserve.sched.step_cost import Forecast, Headrooms, TimeBound, tpot_bound, ttft_left_s
from omniserve.sched.ttft import LSQueue, TTFTEstimator, TTFTPrediction
from omniserve.sched.view import RequestView


class QueueingControl:
    """A ``LatencyControl``: prompts are chunked under S_d one after another, and each step leaves time for a newcomer.

    Requests that would come too late are refused, and headrooms and time for a newcomer left, as the options say.
    """

    def __init__(self, view: RequestView, forecast: Forecast, options: CoServingOptions) -> None:
        self._view, self._memory, self._host = view, view.memory, view.host
        self._forecast, self._headrooms = forecast, Headrooms.of(options.headrooms)
        self._leaves_time = options.newcomer_bound
        self._estimator = TTFTEstimator(forecast, view.limits, options.slack, self._headrooms)
        self._overtaking = Overtaking()
        self._admission = Admission(forecast, refuses=options.admission, headrooms=self._headrooms)
        self.deadlines = Deadlines(
            view, forecast, self._usual_bound_s, refuses=options.admission, has_headroom=options.headrooms
        )

    # -- arrivals and ends ---------------------------------------------------------------------------------------

    def on_arrival(self, state: RequestState, now_s: float, begin_s: float) -> float:
        """Predict the time to first token of an LS request (3.3.3), and reject it if that is too long."""
        prediction = self._predict(state, now_s)
        self._admission.scale(state, prediction)
        if state.has_scaled_ttft:  # shorter prompts behind it may be computed first
            prediction = self._predict(state, now_s)
        # What it will have waited before a step can have it.
        waited_s = max(0.0, now_s - state.arrival_s) + (begin_s - now_s)
        elsewhere_s = self._view.expected_s(state)
        state.predicted_here_s = waited_s + prediction.expected_s
        self._estimator.note(state)
        self._admission.judge(
            state,
            prediction,
            now_s=now_s,
            waited_s=waited_s,
            is_idle=self._view.is_only_ls(state),
            elsewhere_s=elsewhere_s,
        )
        if state.request.deadline_s is not None:
            soonest_s = prediction.soonest_s if elsewhere_s is None else min(prediction.soonest_s, elsewhere_s)
            self.deadlines.admit_ls(state, waited_s + soonest_s)
        self._note_overtaken(state, now_s)
        self._overtaking.note(state, now_s)
        if elsewhere_s is not None and elsewhere_s < prediction.expected_s:
            state.soonest_ttft_s = None  # the margin learns from what is computed here
            return waited_s + elsewhere_s
        return waited_s + prediction.expected_s

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        """Learn from an LS request's first token."""
        self._admission.learn(state, now_s)

    def on_end(self, state: RequestState) -> None:
        """Learn from the length of an LS request's output."""
        self._estimator.note_end(state)
        self.deadlines.note_end(state)

    @property
    def margin(self) -> float:
        """The share of a TTFT that admission leaves, in [0, 1)."""
        return self._admission.margin

    def soonest_s(self, states: Sequence[RequestState], now_s: float, begin_s: float) -> list[float]:
        """Return the TTFT that each of these requests of a class would have if BE work gave way entirely."""
        others = [*self._other_prompts(states[0])]
        queue = self._queue_before(states[0], others, now_s)
        predictions = (self._predict_behind(queue, state, others, now_s, has_best_effort=False) for state in states)
        return [begin_s - now_s + prediction.soonest_s for prediction in predictions]

    def admittable_per_s(self, now_s: float, begin_s: float) -> dict[str, float]:
        """Return how many more requests a second admission would let in now, by LS class with a TTFT objective.

        They are like the mean of those that came lately; see ``admittable.py``.
        """
        if not self._admission.refuses:
            return {}
        rates: dict[str, float] = {}
        lengths = self._estimator.usual_lengths or (UNKNOWN_PROMPT_TOKENS, UNKNOWN_MAX_TOKENS)
        has_best_effort = bool(self._view.waiting[BE] or self._view.device[BE])
        is_idle = not any(state.kind is LS for state in self._view.states.values())
        for rank, spec in enumerate(self._view.limits.config.classes):
            if spec.kind is not LS or spec.slo.ttft_s is None:
                continue
            state = made_up(spec, rank, lengths, now_s, self._view.account_of_newcomer(spec.name))
            others, equals = [*self._other_prompts(state)], earlier_ones(state)

            def first_token_s(
                count: int,
                state: RequestState = state,
                others: Sequence[RequestState] = others,
                equals: Sequence[RequestState] = equals,
            ) -> float:
                known = [*others, *equals[: count - 1]]
                queue = self._queue_before(state, known, now_s)
                prediction = self._predict_behind(queue, state, known, now_s, has_best_effort=has_best_effort)
                return begin_s - now_s + prediction.soonest_s

            within_s = self._admission.least_s(spec.slo.ttft_s, now_s)
            rates[spec.name] = admittable_per_s(first_token_s, within_s, is_idle=is_idle)
        return rates

    def _predict(self, state: RequestState, now_s: float) -> TTFTPrediction:
        """Predict for a request that comes now."""
        others = [*self._other_prompts(state)]
        has_best_effort = bool(self._view.waiting[BE] or self._view.device[BE])
        queue, coming = self._queue_before(state, others, now_s), self._view.coming(state)
        return self._predict_behind(queue, state, others, now_s, has_best_effort=has_best_effort, coming=coming)

    def _predict_behind(
        self,
        queue: LSQueue,
        state: RequestState,
        others: Sequence[RequestState],
        now_s: float,
        *,
        has_best_effort: bool,
        coming: Coming | None = None,
    ) -> TTFTPrediction:
        """Predict for a request behind a queue, and behind what other tenants will send that comes before it.

        Args:
            others: The other LS requests with prefill left, those of the queue among them.
            coming: KV that will be copied to the device for the request.
        """
        predict = functools.partial(
            self._estimator.predict,
            state,
            queue,
            now_s,
            has_best_effort=has_best_effort,
            host_works=self._host.is_busy,
            coming=coming,
        )
        prediction = predict()
        num_overtaking = self._overtaking.num_tokens(state, queue.prompts, others, prediction.soonest_s, now_s)
        return predict(num_overtaking=num_overtaking) if num_overtaking else prediction

    def _queue_before(self, state: RequestState, others: Sequence[RequestState], now_s: float) -> LSQueue:
        """Return the queue before a request, of LS decodes and of these others with prefill left."""
        ahead = ahead_of(state, others, now_s)
        return self._queue([other for other in self._view.device[LS].everyone() if other.decodes], ahead)

    def _other_prompts(self, state: RequestState) -> Iterator[RequestState]:
        """Yield the other LS requests with prefill left."""
        loading = (other for other in self._view.loading if other.kind is LS)
        in_line = itertools.chain(self._view.device[LS].everyone(), self._view.waiting[LS].everyone(), loading)
        return (other for other in in_line if other is not state and not other.decodes)

    def _note_overtaken(self, state: RequestState, now_s: float) -> None:
        """Let the margin learn nothing from prompts of other tenants that a new one comes before.

        If they are late, it is not because their predictions were wrong.
        """
        rivals = [s for s in self._other_prompts(state) if s.account.of_class is state.account.of_class]
        if any(rival.account is not state.account for rival in rivals):
            ahead = {*ahead_of(state, rivals, now_s)}
            for rival in rivals:
                if rival not in ahead and rival.account is not state.account:
                    rival.soonest_ttft_s = None

    def _queue(self, decoding: Sequence[RequestState], prompts: Sequence[RequestState]) -> LSQueue:
        """Return the queue of these LS requests, with the blocks that they have or can have."""
        memory, on_device = self._memory, self._view.device[LS].everyone()
        held = {state.request_id: memory.num_blocks(state) for state in on_device}
        of_ls = sum(held.values()) - sum(map(memory.num_shared_at_begin, on_device))
        of_be = sum(map(memory.num_blocks, self._view.device[BE].everyone()))
        of_be += sum(len(move.src_block_ids) for move in memory.moves_to_host)
        free = memory.num_free
        # Blocks that several requests share count for each, so BE requests have no more than all others.
        num_free = free + min(of_be, max(0, memory.num_device_blocks - free - of_ls))
        num_places = self._view.limits.config.max_num_seqs - memory.num_admitted(LS)
        known = {*decoding, *prompts}
        behind = [state for state in on_device if state not in known]
        return LSQueue(decoding, prompts, held, num_free, num_places, behind)

    # -- bounds --------------------------------------------------------------------------------------------------

    def first_token_bound_s(self, state: RequestState, begin_s: float) -> float:
        """Return the seconds until the first token is due, less the share of its TTFT that is kept back."""
        return ttft_left_s(state, begin_s, self._headrooms.ttft)

    def long_prompt_bound_s(
        self, batch: Batch, decoding: Sequence[RequestState], bound_s: float, begin_s: float
    ) -> float:
        """Return the most seconds of a step for a prompt with a scaled TTFT: a short one could wait for it."""
        if not self._forecast.predictor.has_seen(1):
            return math.inf
        return self._newcomer_bound_s(batch, decoding, bound_s, begin_s)

    def best_effort_bound(
        self,
        batch: Batch,
        s_be: TimeBound,
        decoding: Sequence[RequestState],
        unfinished: Sequence[RequestState],
        begin_s: float,
    ) -> TimeBound:
        """Return what BE work may lengthen the step to: no TPOT or TTFT may suffer, nor a newcomer's (3.3.4)."""
        assert batch.cost is not None
        ls_s, bound = batch.cost.seconds(), s_be
        for state in self._view.device[LS]:
            if state in batch and batch.samples(state) and state.num_output_tokens == 0:
                left_s = ttft_left_s(state, begin_s, self._headrooms.ttft)
                bound = bound.or_tighter(max(left_s, ls_s), f"ttft of {state.request_id}")
        if unfinished:
            queue = self._queue(decoding, unfinished)
            for request_id, left_s in self._estimator.prompt_bounds(queue, batch, s_be.seconds, begin_s):
                bound = bound.or_tighter(max(left_s, ls_s), f"ttft of {request_id}")
        newcomer_s = self._newcomer_bound_s(batch, decoding, s_be.seconds, begin_s)
        return bound.or_tighter(newcomer_s, "ttft of a new request")

    def _usual_bound_s(self, decoding: Sequence[RequestState]) -> float:
        """Return the most seconds of steps with these LS decodes, as BE work may make them one after another."""
        bound_s = tpot_bound(decoding, 0.0, "step", self._headrooms.be).seconds
        if not self._leaves_time:
            return bound_s
        margin = self._admission.margin
        return min(bound_s, self._estimator.newcomer_bound_s(decoding, bound_s, margin=margin, busy_s=0.0))

    def _newcomer_bound_s(
        self, batch: Batch, decoding: Sequence[RequestState], bound_s: float, begin_s: float
    ) -> float:
        """Return the longest step after which a new request can keep its TTFT; infinite if none is reckoned with."""
        if not self._leaves_time:
            return math.inf
        return self._estimator.newcomer_bound_s(
            decoding, bound_s, margin=self._admission.margin, busy_s=begin_s - batch.now_s
        )

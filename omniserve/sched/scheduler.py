"""Scheduler: what the engine drives. It plans steps by a policy, and books what comes of them.

A step may be launched while the one before it runs, so a request's newest token may be *pending*: its place is taken,
its value comes with ``settle``. If it then turns out to have been the last, what a later step in flight computes for
the request is dropped. Its blocks are free at once all the same: steps, and the copies that a plan starts, run on the
device in the order of their launch, so whichever request is given the blocks writes them after that.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from omniserve.core.errors import RequestRejected
from omniserve.core.load import PROMPT_SIZES, EngineLoad
from omniserve.core.lora import LoRA
from omniserve.core.plan import PENDING_TOKEN, DeviceChunk, StepOutput, StepPlan
from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, ServiceClass, TokenLogprob
from omniserve.core.stats import SchedulerStats
from omniserve.core.work import HostEvent
from omniserve.kv.base import KVManager
from omniserve.sched.admittable import made_up
from omniserve.sched.batch import Batch
from omniserve.sched.counts import Counts
from omniserve.sched.features.base import PLAIN_SETTINGS, FeatureSettings, Row
from omniserve.sched.host_booking import HostBooking
from omniserve.sched.options import PolicyOptions, SchedulerLimits
from omniserve.sched.patience import Patience
from omniserve.sched.policy import Policy, checked
from omniserve.sched.request_table import RequestTable
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import Forecast
from omniserve.sched.view import RequestView

logger = logging.getLogger(__name__)


class Told(NamedTuple):
    """A request that gets tokens or log-probabilities from a step, once the step's output is known."""

    state: RequestState
    """The request. Its id may be in use again when the tokens are known."""
    row: Row
    """Its device rows in the step, or the row of the host tier with which its token has passed the last layer."""


class Scheduler:
    """A policy and the requests it plans for. Called by one thread, in the order: notify, schedule, update.

    An engine whose device shall not wait between steps takes ``update`` apart: ``advance`` as it launches a step, then
    notify, schedule and launch of the next one, then ``settle`` of the first. At most one step is ahead of another, and
    only one whose plan ``is_certain`` is advanced before its outcome is known. Requests may end in between.

    Without ``options`` the policy has its defaults, without a latency model there is no ``forecast``.
    """

    def __init__(
        self,
        policy: type[Policy],
        options: PolicyOptions | None = None,
        *,
        limits: SchedulerLimits,
        kv: KVManager,
        forecast: Forecast | None = None,
        settings: FeatureSettings = PLAIN_SETTINGS,
    ) -> None:
        options = options or policy.options_type()
        settings = dataclasses.replace(settings, options=options)
        self.requests = RequestTable(
            limits=limits, kv=kv, offloads=policy.offloads, offloads_ls=policy.offloads_ls, settings=settings
        )
        self._host = HostBooking(self.requests.residents.tokens, self.requests.states, num_layers=limits.num_layers)
        self.policy = policy(RequestView(self.requests), partial(Batch, self.requests), options, forecast)
        self._limits = limits
        self._kv = kv
        self._classes = {spec.name: (rank, ServiceClass(spec.kind)) for rank, spec in enumerate(limits.config.classes)}
        self._in_flight: dict[int, list[Told]] = {}
        """Steps that were advanced and are not settled, by id."""
        self._orders = itertools.count()
        self._patience = Patience(self.requests.states)
        self._counts = Counts(self.requests)

    # -- arrivals and ends ---------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        request: Request,
        slo: SLO,
        now_s: float,
        *,
        arrival_s: float | None = None,
        lora: LoRA | None = None,
    ) -> float | None:
        """Take a request.

        Args:
            arrival_s: When it came to the server, at most ``now_s``; None: now.
            lora: The adapter that it names.

        Returns:
            The predicted time to first token, seconds from arrival; None if the policy predicts none.

        Raises:
            RequestRejected: Its objectives cannot be met at present load.
            ValueError: A request of that id has ended, but a copy or a host task still uses its KV.
        """
        rank, kind = self._classes[request.service_class]
        arrival_s = now_s if arrival_s is None else arrival_s
        due_s = math.inf if request.deadline_s is None or kind is LS else arrival_s + request.deadline_s
        state = RequestState(
            request_id=request_id,
            request=request,
            slo=slo,
            kind=kind,
            priority_key=(rank, due_s, next(self._orders)),
            account=self.requests.accounts[request.service_class].of(request.tenant, request.weight),
            arrival_s=arrival_s,
            token_ids=list(request.prompt_token_ids),
            lora=lora,
        )
        self.requests.add(state)
        self._patience.note(state)
        self._tell_time(now_s)
        try:
            state.predicted_ttft_s = self.policy.on_arrival(state, now_s)
        except Exception as error:
            self._counts.rejected[state.service_class] += isinstance(error, RequestRejected)
            self.requests.end(state)
            raise
        self.requests.prefixes.note_session(state, now_s)
        return state.predicted_ttft_s

    def load(self, now_s: float, num_taken: int) -> EngineLoad:
        """Return the load, with ``num_taken`` as it is."""
        self._tell_time(now_s)
        forecasts: dict[str, Sequence[float]] = {}
        for name, (rank, kind) in self._classes.items():
            if kind is LS:
                spec = self._limits.config.class_named(name)
                account = self.requests.account_of_newcomer(name)
                prompts = [made_up(spec, rank, (size, 1), now_s, account) for size in PROMPT_SIZES]
                if (seconds := self.policy.soonest_s(prompts, now_s)) is not None:
                    forecasts[name] = seconds
        done = self._counts.num_tokens(name for name, (_, kind) in self._classes.items() if kind is BE)
        return EngineLoad(num_taken=num_taken, ttft_s=forecasts, be_tokens=done)

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        """End a request now; None if it is unknown or has finished. Its KV is freed as soon as nothing reads it."""
        state = self.requests.states.get(request_id)
        if state is None:
            return None
        if state.num_output_tokens:
            self.policy.on_end(state)
        self.requests.end(state)
        return state.output(reason=FinishReason.ABORT, now_s=now_s)

    def end_failed(self, now_s: float) -> list[RequestOutput]:
        """End the requests whose adapter could not be read or that waited too long, and return their outputs."""
        loras = self.requests.loras
        outputs: list[RequestOutput] = []
        for state, message in loras.failed().items() if loras is not None else ():
            logger.error("request %s failed: %s", state.request_id, message)
            self.requests.end(state)
            outputs.append(state.output(reason=FinishReason.ERROR, stop_reason=message, now_s=now_s))
        for state in self._patience.ended(now_s):
            self.requests.end(state)
            outputs.append(state.output(reason=FinishReason.TIMEOUT, now_s=now_s))
        return outputs

    # -- a step --------------------------------------------------------------------------------------------------

    def notify(self, events: Sequence[HostEvent]) -> None:
        """Learn what finished beside the steps: host attention and KV moves."""
        self.requests.notify(events)
        self.policy.on_host_events(events)

    def schedule(self, now_s: float) -> StepPlan:
        """Decide the next step; allocates the KV it needs."""
        self._tell_time(now_s)
        self.requests.start_loading(self.policy.forecast, now_s)
        return self._ask_policy(now_s)

    def _ask_policy(self, now_s: float) -> StepPlan:
        return checked(self.policy, self.policy.schedule(now_s))

    def _tell_time(self, now_s: float) -> None:
        self.requests.prefixes.tell_time(now_s)
        if self.policy.forecast is not None:
            self.policy.forecast.predictor.at(now_s)

    def schedule_moves(self, now_s: float) -> StepPlan:
        """Decide a step that computes nothing: it begins copies between the tiers."""
        return Batch(self.requests, now_s).plan()

    def update(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        """Book what a step computed: append tokens, finish requests, free KV."""
        self.advance(plan, output)
        return self.settle(plan, output, now_s)

    @property
    def awaits_tokens(self) -> bool:
        """Return whether the next plan is worth waiting for the tokens of the step in flight."""
        device = self.requests.device.values()
        return any(feature.awaits_tokens(itertools.chain(*device)) for feature in self.requests.features.on)

    def is_certain(self, plan: StepPlan) -> bool:
        """Return whether a plan computes something, and all that ``advance`` books of it is known before it has run.

        What is booked of host rows may be corrected by ``settle``: see ``HostBooking``.
        """
        if plan.is_empty or not self._host.is_certain(plan):
            return False
        if any(chunk.scores is not None for chunk in plan.chunks):
            return False
        if not all(feature.is_certain(plan) for feature in self.requests.features.on):
            return False
        # What a grammar allows next depends on the token before.
        ids = itertools.chain((chunk.request_id for chunk in plan.chunks), (join.request_id for join in plan.joins))
        return all(self.requests.states[request_id].request.sampling.grammar is None for request_id in ids)

    def advance(self, plan: StepPlan, output: StepOutput | None = None) -> None:
        """Book what is known of a step without its tokens: which KV there is, where requests are, which get a token.

        Each new token is PENDING_TOKEN until ``settle``. A request that gets its last one is not scheduled any more.
        Without an ``output`` the plan is certain.
        """
        requests, told, known = self.requests, list[Told](), output or StepOutput()
        features = requests.features.on
        for chunk in plan.chunks:
            state = requests.states[chunk.request_id]
            if features and any([feature.takes_outcome(state, chunk, known) for feature in features]):
                continue
            state.num_computed_tokens = chunk.start + len(chunk.token_ids)
            if chunk.pooled is not None:
                state.num_pooled_rows = state.num_computed_tokens
            for feature in features:
                feature.on_computed(state, chunk, known, self._expect_token)
            requests.prefixes.publish(state)
            if chunk.samples:
                self._expect_token(state)
            if chunk.samples or chunk.scores is not None:
                told.append(Told(state, chunk))
        for state, row, is_lost in self._host.book(plan, output) if requests.residents.has_some else ():
            if is_lost:
                requests.preempt(state)
            else:
                self._book_host_row(Told(state, row), known, told)
        self._in_flight[plan.step_id] = told

    def _book_host_row(self, passed: Told, output: StepOutput, told: list[Told]) -> None:
        """Book a host row that has passed all layers, and put it to those that get a token."""
        features = self.requests.features.on
        if any([feature.takes_outcome(*passed, output) for feature in features]):
            return
        passed.state.num_computed_tokens += 1
        self._expect_token(passed.state)
        for feature in features:
            feature.on_computed(*passed, output, self._expect_token)
        told.append(passed)

    def _expect_token(self, state: RequestState) -> None:
        if state.newest.expect(self._limits.max_model_len):
            self.requests.let_go(state, Phase.ENDING)

    def settle(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        """Fill in a step's tokens and end requests; to be called once for each advanced plan, in their order.

        What the step computed for requests that have ended since it was launched is dropped.
        """
        self.policy.on_step_end(plan, now_s)
        outputs: list[RequestOutput] = []
        rows = self._in_flight.pop(plan.step_id)
        for state, row, _ in self._host.settle(plan, output) if plan.joins else ():
            self._book_host_row(Told(state, row), output, rows)
        for told in rows:
            state, chunk = told.state, told.row if isinstance(told.row, DeviceChunk) else None
            request_id = state.request_id
            if self.requests.states.get(request_id) is not state:
                continue  # it has ended; the id may be another request's
            if chunk is not None and chunk.scores is not None and request_id in output.prompt_logprobs:
                state.prompt_logprobs += output.prompt_logprobs[request_id]
                state.num_scored_rows = chunk.start + chunk.scores.first_row + len(chunk.scores.token_ids)
            if chunk is None or chunk.samples or request_id in output.failed:
                outputs.append(self._settle_tokens(told, output, now_s))
        return outputs

    def refresh(self, plan: StepPlan) -> StepPlan:
        """Return a plan that was made before the last ``settle``, with the tokens that came.

        Without the requests that have ended, and without joins of tokens that have not come to their layer.

        Only of a plan that is neither launched nor advanced.
        """

        def tokens(chunk: DeviceChunk) -> DeviceChunk:
            if chunk.token_ids[-1] != PENDING_TOKEN:
                return chunk
            end = chunk.start + len(chunk.token_ids)
            known = tuple(states[chunk.request_id].token_ids[chunk.start : end])
            return dataclasses.replace(chunk, token_ids=known)

        states = self.requests.states
        chunks = tuple(tokens(chunk) for chunk in plan.chunks if chunk.request_id in states)
        return self._host.refresh(dataclasses.replace(plan, chunks=chunks))

    def _settle_tokens(self, told: Told, output: StepOutput, now_s: float) -> RequestOutput:
        """Fill in the tokens of a row, and end the request if they do."""
        state = told.state
        if (message := output.failed.get(state.request_id)) is not None:
            about = {"engine_request_id": state.request_id}
            logger.error("request %s failed: %s", state.request_id, message, extra=about)
            self.requests.end(state)
            failed = state.output(reason=FinishReason.ERROR, stop_reason=message, now_s=now_s)
            return self._complete(told, failed, num_sampled=0)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        state.last_token_s = now_s
        if state.first_token_s is None:
            state.first_token_s = now_s
            self._counts.prompt_tokens[state.service_class] += state.num_prompt_tokens
            self.policy.on_first_token(state, now_s)
            self.requests.loads.note_first_token(state, now_s)
            prompt_logprobs = tuple(state.prompt_logprobs)
            if state.request.sampling.max_tokens == 0:
                self.requests.end(state)
                return state.output(
                    prompt_logprobs=prompt_logprobs,
                    embedding=output.embeddings.get(state.request_id, ()),
                    reason=FinishReason.LENGTH,
                    now_s=now_s,
                )
        sampled, reason, stop_reason = output.tokens[state.request_id], None, None
        token_ids, logprobs = [], []
        for token in sampled:
            state.newest.put(token.token_id)
            token_ids.append(token.token_id)
            if token.logprob is not None:
                logprobs.append(token.logprob)
            reason, stop_reason = state.newest.finish_reason(
                token.token_id, self._limits.eos_token_ids, self._limits.max_model_len
            )
            if reason is not None:
                break  # what was sampled behind the end is dropped
        num_new = len(token_ids)
        self._counts.output_tokens[state.service_class] += num_new
        state.account.put_out(num_new)
        if not isinstance(told.row, DeviceChunk):
            state.num_host_tokens += num_new
            self.requests.counters["host_output_tokens"] += num_new
            self.requests.counters["ls_host_output_tokens"] += num_new if state.kind is LS else 0
        if reason is not None:
            state.newest.drop_pending()  # of a later step in flight, or behind the end
            self.policy.on_end(state)
            self.requests.end(state)
        new = state.output(
            tuple(token_ids),
            tuple(logprobs),
            prompt_logprobs=prompt_logprobs,
            reason=reason,
            stop_reason=stop_reason,
            now_s=now_s,
        )
        return self._complete(told, new, num_sampled=len(sampled))

    def _complete(self, told: Told, output: RequestOutput, *, num_sampled: int) -> RequestOutput:
        """Return an output with what features add to it."""
        for feature in self.requests.features.on:
            output = feature.on_output(told.state, told.row, output, num_sampled)
        return output

    def discount(self, output: RequestOutput, left: RequestOutput) -> None:
        """Do not count tokens of a step's output that a stop string has cut off: only ``left`` is of use."""
        self._counts.output_tokens[output.service_class] -= len(output.new_token_ids) - len(left.new_token_ids)
        for feature in self.requests.features.on:
            feature.discount(output, left)

    # -- what others ask -----------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """True while a request is unfinished or a slot or move has not been given back."""
        return not self.requests.is_empty

    def stats(self) -> SchedulerStats:
        """Return gauges and counters."""
        return self._counts.stats()

    def admittable_per_s(self, now_s: float) -> dict[str, float]:
        """Return how many more requests a second would be admitted now, by LS class; without those not known."""
        self._tell_time(now_s)
        return self.policy.admittable_per_s(now_s)

    def check_integrity(self) -> None:
        """Verify the invariants of the requests, of their tokens and of the KV manager; for tests and debugging.

        Raises:
            AssertionError: With what does not fit.
        """
        self.requests.check_integrity()
        for state in self.requests.states.values():
            pending = state.token_ids.count(PENDING_TOKEN)
            assert pending == state.num_pending_tokens <= len(self._in_flight), (state.request_id, pending)

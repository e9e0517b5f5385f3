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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from omniserve.core.errors import RequestRejected
from omniserve.core.plan import PENDING_TOKEN, DeviceChunk, PiggybackEntry, PiggybackJoin, StepOutput, StepPlan
from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, ServiceClass, TokenLogprob
from omniserve.core.stats import SchedulerStats
from omniserve.core.work import HostEvent
from omniserve.kv.base import KVManager, Tier
from omniserve.sched.batch import Batch
from omniserve.sched.options import PolicyOptions, SchedulerLimits
from omniserve.sched.policy import Policy
from omniserve.sched.request_table import RequestTable
from omniserve.sched.residents import AssumedJoin
from omniserve.sched.state import HaltedChunk, Phase, RequestState
from omniserve.sched.step_cost import Forecast

if TYPE_CHECKING:
    from omniserve.sched.drafter import Drafter
    from omniserve.sched.speculation import Speculation

logger = logging.getLogger(__name__)


class _Settled(NamedTuple):
    """A request that a step has told something, when its tokens are known."""

    state: RequestState
    """The request. Its id may be in use again when the tokens are known."""
    chunk: DeviceChunk | None
    """The request's device rows; None: its token has passed the last layer on the host tier."""
    num_drafts: int


@dataclass(frozen=True, slots=True)
class _Advanced:
    """A step that was advanced and is not settled."""

    rows: Sequence[_Settled]
    joins: Sequence[AssumedJoin]


class Scheduler:
    """A policy and the requests it plans for. Called by one thread, in the order: notify, schedule, update.

    An engine whose device shall not wait between steps takes ``update`` apart: ``advance`` as it launches a step, then
    notify, schedule and launch of the next one, then ``settle`` of the first. At most one step is ahead of another, and
    only one whose plan ``is_certain`` is advanced before its outcome is known. Requests may end in between.

    Without ``options`` the policy has its defaults, without a latency model there is no ``forecast``. ``drafter_of``
    makes the drafter of a request, by its id, that is decoded speculatively.
    """

    def __init__(
        self,
        policy: type[Policy],
        options: PolicyOptions | None = None,
        *,
        limits: SchedulerLimits,
        kv: KVManager,
        forecast: Forecast | None = None,
        drafter_of: Callable[[str, Request], Drafter] | None = None,
    ) -> None:
        options = options or policy.options_type()
        self.requests = RequestTable(limits=limits, kv=kv, offloads=policy.offloads, preempts=options.preempts)
        self.policy = policy(self.requests, options, forecast)
        self._limits = limits
        self._drafter_of = drafter_of
        self._kv = kv
        self._classes = {spec.name: (rank, ServiceClass(spec.kind)) for rank, spec in enumerate(limits.config.classes)}
        self._in_flight: dict[int, _Advanced] = {}
        """Steps that were advanced and are not settled, by id."""
        self._orders = itertools.count()
        self._output_tokens: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter(dict.fromkeys(self._classes, 0))

    # -- arrivals and ends ---------------------------------------------------------------------------------------

    def add(
        self, request_id: str, request: Request, slo: SLO, now_s: float, *, arrival_s: float | None = None
    ) -> float | None:
        """Take a request.

        Args:
            arrival_s: When it came to the server, at most ``now_s``; None: now.

        Returns:
            The predicted time to first token, seconds from arrival; None if the policy predicts none.

        Raises:
            RequestRejected: Its objectives cannot be met at present load.
            ValueError: A request of that id has ended, but a copy or a host task still uses its KV.
        """
        rank, kind = self._classes[request.service_class]
        state = RequestState(
            request_id=request_id,
            request=request,
            slo=slo,
            kind=kind,
            priority_key=(rank, next(self._orders)),
            arrival_s=now_s if arrival_s is None else arrival_s,
            token_ids=list(request.prompt_token_ids),
        )
        state.speculation = self._speculation(request_id, request)
        self.requests.add(state)
        self._tell_time(now_s)
        try:
            state.predicted_ttft_s = self.policy.on_arrival(state, now_s)
        except Exception as error:
            self._rejected[state.service_class] += isinstance(error, RequestRejected)
            self.requests.end(state)
            raise
        return state.predicted_ttft_s

    def scaled_slo(self, request_id: str) -> SLO | None:
        """Return the objectives of an unfinished request if admission has scaled those of its class; else None."""
        state = self.requests.states[request_id]
        return state.slo if state.has_scaled_ttft or state.has_scaled_tpot else None

    def _speculation(self, request_id: str, request: Request) -> Speculation | None:
        """Return what makes a request's drafts; None if it wants none or can have none.

        Recurrent states cannot go back to the last right one.
        """
        is_wanted = request.speculation
        if is_wanted is None:
            spec = self._limits.config.class_named(request.service_class)
            is_wanted = spec.speculation or bool(request.predicted_token_ids)
        if not is_wanted or self._limits.num_state_slots:
            return None
        from omniserve.sched.drafter import prompt_lookup
        from omniserve.sched.speculation import Speculation

        return Speculation((self._drafter_of or prompt_lookup)(request_id, request))

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        """End a request now; None if it is unknown or has finished. Its KV is freed as soon as nothing reads it."""
        state = self.requests.states.get(request_id)
        if state is None:
            return None
        if state.num_output_tokens:
            self.policy.on_end(state)
        self.requests.end(state)
        return state.output(reason=FinishReason.ABORT, now_s=now_s)

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
        plan = self.policy.schedule(now_s)
        assert self.policy.awaits_host or not plan.pipelined, "the policy has a second sub-batch: set its awaits_host"
        return plan

    def _tell_time(self, now_s: float) -> None:
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
        """Return whether the next plan is worth waiting for the tokens of the step in flight.

        So it is if a request could then have drafts: its drafter knows what the token in flight is, and what follows.
        """
        return any(
            state.speculation is not None
            and state.num_pending_tokens == 1
            and state.speculation.knows_next(state.token_ids, state.num_tokens - 1)
            for queue in self.requests.device.values()
            for state in queue
        )

    def is_certain(self, plan: StepPlan) -> bool:
        """Return whether a plan computes something, and all that ``advance`` books of it is known before it has run.

        The exception is whether late joins before the last layer join: ``advance`` assumes that they do, and ``settle``
        corrects it.
        """
        if plan.is_empty or plan.preemptible or plan.pipelined:
            return False
        if (doubtful := plan.doubtful) and any(
            join.request_id in doubtful and self._is_last(join) for join in plan.joins
        ):
            return False
        if any(chunk.from_layer or chunk.scores is not None or chunk.num_drafts for chunk in plan.chunks):
            return False
        if any(join.draft_ids and self._is_last(join) for join in plan.joins):
            return False
        # What a grammar allows next depends on the token before.
        ids = itertools.chain((chunk.request_id for chunk in plan.chunks), (join.request_id for join in plan.joins))
        return all(self.requests.states[request_id].request.sampling.grammar is None for request_id in ids)

    def _is_last(self, join: PiggybackJoin) -> bool:
        return join.layer == self._limits.num_layers - 1

    def advance(self, plan: StepPlan, output: StepOutput | None = None) -> None:
        """Book what is known of a step without its tokens: which KV there is, where requests are, which get a token.

        Each new token is PENDING_TOKEN until ``settle``. A request that gets its last one is not scheduled any more.
        If there is no ``output`` yet, the plan is certain, and its late joins are assumed to join.
        """
        assumed = plan.doubtful if output is None else frozenset()
        output, requests = output or StepOutput(), self.requests
        missed = output.missed
        residents, has_device_rows = requests.residents, bool(plan.chunks)
        if not plan.is_empty:
            residents.count_step(plan.joins, has_device_rows=has_device_rows)
        rows: list[_Settled] = []
        assumed_joins: list[AssumedJoin] = []
        for chunk in plan.chunks:
            state = requests.states[chunk.request_id]
            state.halted = None
            if (layer := output.halted.get(chunk.request_id)) is not None:
                requests.counters["layer_preemptions"] += 1
                if layer > 0:
                    state.halted = HaltedChunk(layer, chunk.start, len(chunk.token_ids))
                continue
            if chunk.request_id in output.unverified:
                state.speculation = None  # the next step tells whether it was the drafts
                self._kv.trim(state.request_id, state.num_tokens)
                continue
            state.num_computed_tokens = chunk.start + len(chunk.token_ids)
            if chunk.num_drafts:
                self._verify_drafts(state, chunk, output)
            requests.prefixes.publish(state)
            if chunk.samples:
                self._expect_token(state)
            if chunk.samples or chunk.scores is not None:
                rows.append(_Settled(state, chunk, chunk.num_drafts))
        for entry in plan.entries:
            residents.enter(requests.states[entry.request_id], entry.position, entry.draft_ids)
        for join in plan.joins:
            state = requests.states[join.request_id]
            if join.request_id in missed:
                residents.miss(state, has_device_rows=has_device_rows)
            elif join.request_id in assumed:
                assumed_joins.append(residents.assume(state, join.draft_ids, has_device_rows=has_device_rows))
            elif residents.advance(state, join.draft_ids, has_device_rows=has_device_rows):
                rows += self._arrived(state, len(join.draft_ids), output)
        for row in plan.pipelined:
            state = requests.states[row.request_id]
            residents.arrive(state)
            if row.request_id in output.lost:
                requests.preempt(state)
            else:
                rows += self._arrived(state, 0, output)
        self._in_flight[plan.step_id] = _Advanced(rows, assumed_joins)

    def _verify_drafts(self, state: RequestState, chunk: DeviceChunk, output: StepOutput) -> None:
        """Book which drafts of a chunk were right, and take back the rows of the others; without tokens none was."""
        num_right = max(0, len(output.tokens.get(chunk.request_id, ())) - 1)
        state.num_computed_tokens -= chunk.num_drafts - num_right
        for _ in range(num_right):
            self._expect_token(state)
        if num_right < chunk.num_drafts and state.phase is Phase.DEVICE:
            self._kv.trim(state.request_id, state.num_computed_tokens)

    def _arrived(self, state: RequestState, num_drafts: int, output: StepOutput) -> list[_Settled]:
        """Book that a token has passed its last layer on the host tier, with ``num_drafts`` drafts."""
        is_verified = state.request_id not in output.unverified
        if is_verified:
            # Without drafts one token is certain; with them the output is there. One that has failed has none.
            num_new = max(1, len(output.tokens.get(state.request_id, ())))
            state.num_computed_tokens += num_new
            for _ in range(num_new):
                self._expect_token(state)
        else:
            state.speculation = None  # its next trip tells whether it was the drafts
        if state.phase is Phase.HOST and (state.speculation is not None or not is_verified):
            self._kv.trim(state.request_id, state.num_computed_tokens + (not is_verified))
        return [_Settled(state, None, num_drafts)] if is_verified else []

    def _expect_token(self, state: RequestState) -> None:
        if state.expect_token(self._limits.max_model_len):
            self.requests.let_go(state, Phase.ENDING)

    def settle(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        """Fill in a step's tokens and end requests; to be called once for each advanced plan, in their order.

        What the step computed for requests that have ended since it was launched is dropped.
        """
        self.policy.on_step_end(plan, now_s)
        outputs: list[RequestOutput] = []
        advanced = self._in_flight.pop(plan.step_id)
        for join in advanced.joins:
            self.requests.residents.settle(join, joined=join.state.request_id not in output.missed)
        for settled in advanced.rows:
            state, chunk = settled.state, settled.chunk
            request_id = state.request_id
            if self.requests.states.get(request_id) is not state:
                continue  # it has ended; the id may be another request's
            if chunk is not None and chunk.scores is not None and request_id in output.prompt_logprobs:
                state.prompt_logprobs += output.prompt_logprobs[request_id]
                state.num_scored_rows = chunk.start + chunk.scores.first_row + len(chunk.scores.token_ids)
            if chunk is None or chunk.samples or request_id in output.failed:
                outputs.append(self._settle_tokens(settled, output, now_s))
        return outputs

    def refresh(self, plan: StepPlan) -> StepPlan:
        """Return a plan that was made before the last ``settle``, with the tokens that came.

        Without the requests that have ended, and without joins of tokens that have not come to their layer.

        Only of a plan that is neither launched nor advanced.
        """

        def token(row: PiggybackEntry) -> PiggybackEntry:
            if row.token_id != PENDING_TOKEN:
                return row
            return dataclasses.replace(row, token_id=states[row.request_id].token_ids[row.position])

        def tokens(chunk: DeviceChunk) -> DeviceChunk:
            if chunk.token_ids[-1] != PENDING_TOKEN:
                return chunk
            end = chunk.start + len(chunk.token_ids)
            known = tuple(states[chunk.request_id].token_ids[chunk.start : end])
            return dataclasses.replace(chunk, token_ids=known)

        states = self.requests.states
        chunks = tuple(tokens(chunk) for chunk in plan.chunks if chunk.request_id in states)
        return dataclasses.replace(
            plan,
            chunks=chunks,
            entries=tuple(token(entry) for entry in plan.entries if entry.request_id in states),
            joins=tuple(join for join in plan.joins if self.requests.residents.is_at(join)),
            pipelined=tuple(
                # Without device rows there is no first sub-batch.
                dataclasses.replace(token(row), is_hybrid=row.is_hybrid and bool(chunks))
                if isinstance(row, PiggybackEntry)
                else row
                for row in plan.pipelined
                if row.request_id in states
            ),
        )

    def _settle_tokens(self, settled: _Settled, output: StepOutput, now_s: float) -> RequestOutput:
        state, num_drafts = settled.state, settled.num_drafts
        if (message := output.failed.get(state.request_id)) is not None:
            about = {"engine_request_id": state.request_id}
            logger.error("request %s failed: %s", state.request_id, message, extra=about)
            self.requests.counters["rejected_drafts"] += num_drafts
            self.requests.end(state)
            return state.output(
                num_rejected_drafts=num_drafts, reason=FinishReason.ERROR, stop_reason=message, now_s=now_s
            )
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        state.last_token_s = now_s
        if state.first_token_s is None:
            state.first_token_s = now_s
            self._prompt_tokens[state.service_class] += state.num_prompt_tokens
            self.policy.on_first_token(state, now_s)
            self.requests.loads.note_first_token(state, now_s)
            prompt_logprobs = tuple(state.prompt_logprobs)
            if state.request.sampling.max_tokens == 0:
                self.requests.end(state)
                return state.output(prompt_logprobs=prompt_logprobs, reason=FinishReason.LENGTH, now_s=now_s)
        sampled, reason, stop_reason = output.tokens[state.request_id], None, None
        token_ids, logprobs = [], []
        for token in sampled:
            state.put_token(token.token_id)
            token_ids.append(token.token_id)
            if token.logprob is not None:
                logprobs.append(token.logprob)
            reason, stop_reason = state.finish_reason(
                token.token_id, self._limits.eos_token_ids, self._limits.max_model_len
            )
            if reason is not None:
                break  # what drafts have brought behind the end is dropped
        num_new = len(token_ids)
        self._output_tokens[state.service_class] += num_new
        if settled.chunk is None:
            state.num_host_tokens += num_new
            self.requests.counters["host_output_tokens"] += num_new
        num_accepted = 0
        if num_drafts:
            num_right = len(sampled) - 1
            num_accepted = min(num_right, num_new)
            assert state.speculation is not None, f"{state.request_id} had drafts, but nothing that makes them"
            state.speculation.learn(num_drafts, num_right)
            self.requests.counters["accepted_drafts"] += num_accepted
            self.requests.counters["rejected_drafts"] += num_drafts - num_accepted
        if reason is not None:
            state.drop_pending()  # of a later step in flight, or behind the end
            self.policy.on_end(state)
            self.requests.end(state)
        return state.output(
            tuple(token_ids),
            tuple(logprobs),
            num_accepted_drafts=num_accepted,
            num_rejected_drafts=num_drafts - num_accepted,
            prompt_logprobs=prompt_logprobs,
            reason=reason,
            stop_reason=stop_reason,
            now_s=now_s,
        )

    def discount(self, output: RequestOutput, left: RequestOutput) -> None:
        """Do not count tokens of a step's output that a stop string has cut off: only ``left`` is of use."""
        self._output_tokens[output.service_class] -= len(output.new_token_ids) - len(left.new_token_ids)
        num_rejected = output.num_accepted_drafts - left.num_accepted_drafts
        self.requests.counters["accepted_drafts"] -= num_rejected
        self.requests.counters["rejected_drafts"] += num_rejected

    # -- what others ask -----------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """True while a request is unfinished or a slot or move has not been given back."""
        return not self.requests.is_empty

    @property
    def is_saving(self) -> bool:
        """True while prefixes are being copied to the host or to disk."""
        return self.requests.prefixes.is_saving or self.requests.loads.is_writing

    def stats(self) -> SchedulerStats:
        """Return gauges and counters."""
        counters: dict[str, Any] = dict(self.requests.counters)
        waiting, running = dict.fromkeys(self._classes, 0), dict.fromkeys(self._classes, 0)
        for state in self.requests.states.values():
            has_kv = state.phase not in (Phase.WAITING, Phase.LOADING)
            (running if has_kv else waiting)[state.service_class] += 1
        blocks = {tier: dict.fromkeys(self._classes, 0) for tier in Tier}
        for state in (*self.requests.states.values(), *self.requests.ended()):
            for tier, held in blocks.items():
                held[state.service_class] += self._kv.num_held(state.request_id, tier)
        return SchedulerStats(
            waiting=waiting,
            running=running,
            device_blocks_by_class=blocks[Tier.DEVICE],
            host_blocks_by_class=blocks[Tier.HOST],
            host_requests=len(self.requests.residents.queue),
            host_token_steps=self.requests.residents.num_token_steps,
            output_tokens=dict(self._output_tokens),
            prompt_tokens=dict(self._prompt_tokens),
            state_slots_used=self.requests.state_slots.num_used,
            state_slots_total=self.requests.state_slots.num_slots,
            checkpoints=self.requests.checkpoints.num_blocks_copied,
            cached_tokens={name: self.requests.prefixes.num_cached_tokens[name] for name in self._classes},
            restored_tokens={name: self.requests.prefixes.num_restored_tokens[name] for name in self._classes},
            loaded_tokens=self.requests.loads.num_tokens(),
            **counters,
            rejected=dict(self._rejected),
        )

    def check_integrity(self) -> None:
        """Verify the invariants of the requests, of their tokens and of the KV manager; for tests and debugging.

        Raises:
            AssertionError: With what does not fit.
        """
        self.requests.check_integrity()
        for state in self.requests.states.values():
            pending = state.token_ids.count(PENDING_TOKEN)
            assert pending == state.num_pending_tokens <= len(self._in_flight), (state.request_id, pending)

"""RequestLifecycle: a request from arrival to end: what it is made of, its tokens, its results from the host.

A step may be launched while the one before it runs, so a request's newest token may be *pending*: its place is taken,
its value comes with ``settle``. If it then turns out to have been the last, what a later step in flight computes for
the request is dropped. Its blocks are free at once all the same: steps, and the copies that a plan starts, run on the
device in the order of their launch, so whoever is given the blocks writes them after that.

How it changes place meanwhile is in ``transfers``. What is not here is choice: see ``policy``.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from omniserve.core.plan import (
    PENDING_TOKEN,
    DeviceChunk,
    HostEvent,
    HostEventKind,
    PiggybackEntry,
    SampledToken,
    StepOutput,
    StepPlan,
)
from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, ServiceClass, TokenLogprob
from omniserve.kv.base import KVManager, Tier
from omniserve.sched.base import SchedulerLimits, SchedulerStats
from omniserve.sched.load import Forecast
from omniserve.sched.state import HaltedChunk, Phase, RequestState
from omniserve.sched.transfers import RequestTransfers

logger = logging.getLogger(__name__)


class RequestLifecycle(RequestTransfers):
    """Book-keeping shared by all policies.

    Invariants, between calls: a state is in exactly one of ``waiting[kind]``, ``device[kind]``, ``residents.queue``
    and ``moving``, by its phase, or in none of them and ENDING; WAITING and ENDING states have no block table; HOST
    states hold a slot, and so do MOVING ones that come from the host tier or go there.
    """

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager, forecast: Forecast | None = None) -> None:
        super().__init__(limits=limits, kv=kv)
        self.forecast = forecast
        self._classes = {spec.name: (rank, ServiceClass(spec.kind)) for rank, spec in enumerate(limits.classes)}
        self.states: dict[str, RequestState] = {}
        self.draining: dict[int, RequestState] = {}
        self._cancels: list[int] = []
        self._in_flight: dict[int, list[tuple[RequestState, DeviceChunk | None]]] = {}
        """Step id -> what ``settle`` has to look at: states, as ids may be in use again by then; no chunk: on the host
        tier the token has passed its last layer."""
        self._orders = itertools.count()
        self._step_ids = itertools.count()
        self._output_tokens: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter(dict.fromkeys(self._classes, 0))

    # -- arrivals and ends ---------------------------------------------------------------------------------------

    def add(
        self, request_id: str, request: Request, slo: SLO, now_s: float, *, arrival_s: float | None = None
    ) -> float | None:
        if any(ended.request_id == request_id for ended in self._ended()):
            raise ValueError(
                f"request id {request_id!r} is of a request that has ended, but whose KV a copy or a host task still "
                "uses; choose another"
            )
        rank, kind = self._classes[request.service_class]
        state = RequestState(
            request_id=request_id,
            request=request,
            slo=slo,
            kind=kind,
            place=(rank, next(self._orders)),
            arrival_s=now_s if arrival_s is None else arrival_s,
            token_ids=list(request.prompt_token_ids),
        )
        self.states[request_id] = state
        self.kv.declare(request_id, kind)
        self.waiting[state.kind].add(state)
        return None

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        state = self.states.get(request_id)
        if state is None:
            return None
        if state.num_output_tokens:
            self.on_end(state)
        self._end(state)
        return state.output(reason=FinishReason.ABORT, now_s=now_s)

    def _end(self, state: RequestState) -> None:
        """Forget a request; its KV is freed now, or when the copy or host task that uses it is over."""
        del self.states[state.request_id]
        self._let_go(state, Phase.FINISHED)

    def _let_go(self, state: RequestState, into: Phase) -> None:
        """Take a request from where it is; its phase is ``into``, or DRAINING if something still uses its KV."""
        phase, state.phase = state.phase, into
        if phase is Phase.WAITING:
            self.waiting[state.kind].remove(state)
            self.kv.free(state.request_id)
        elif phase is Phase.DEVICE:
            self.device[state.kind].remove(state)
            self.kv.free(state.request_id)
        elif phase is Phase.MOVING:
            state.phase = Phase.DRAINING
        elif phase is Phase.HOST:
            self.residents.queue.remove(state)
            if state.away is not None and not state.away.ready:
                state.phase = Phase.DRAINING
                self.draining[state.slot] = state
                self._cancels.append(state.slot)
            else:
                self._leave_host(state)

    # -- what happens beside the steps ---------------------------------------------------------------------------

    def notify(self, events: Sequence[HostEvent]) -> None:
        for event in events:
            if event.kind in (HostEventKind.MOVE_DONE, HostEventKind.MOVE_FAILED):
                self._finish_move(event)
            elif event.kind is HostEventKind.TIER_DOWN:
                self.host_is_up = False
                for state in self.residents.queue:
                    if state.away is None:
                        self.preempt(state)
            else:
                self._finish_attention(event)

    def _finish_attention(self, event: HostEvent) -> None:
        ended = self.draining.get(event.slot)
        if ended is not None and ended.epoch == event.epoch:
            del self.draining[event.slot]
            ended.phase = Phase.FINISHED
            self._leave_host(ended)
            return
        state = self.residents.on_event(event)
        if state is None:
            logger.warning("dropped a stale host result: %s", event)
        elif event.kind is HostEventKind.ATTENTION_FAILED:
            self.preempt(state)

    # -- result of a step ---------------------------------------------------------------------------------------

    def is_certain(self, plan: StepPlan) -> bool:
        if plan.preemptible or plan.pipelined:
            return False
        if any(chunk.from_layer or chunk.scores is not None for chunk in plan.chunks):
            return False
        # What a grammar allows next depends on the token before.
        ids = itertools.chain((chunk.request_id for chunk in plan.chunks), (join.request_id for join in plan.joins))
        return all(self.states[request_id].request.sampling.grammar is None for request_id in ids)

    def advance(self, plan: StepPlan, output: StepOutput | None = None) -> None:
        output = output or StepOutput()
        rows: list[tuple[RequestState, DeviceChunk | None]] = []
        for chunk in plan.chunks:
            state = self.states[chunk.request_id]
            state.halted = None
            if (layer := output.halted.get(chunk.request_id)) is not None:
                self._counters["layer_preemptions"] += 1
                if layer > 0:
                    state.halted = HaltedChunk(layer, chunk.start, len(chunk.token_ids))
                continue
            state.num_computed_tokens = chunk.start + len(chunk.token_ids)
            if chunk.samples:
                self._expect_token(state)
            if chunk.samples or chunk.scores is not None:
                rows.append((state, chunk))
        for entry in plan.entries:
            self.residents.enter(self.states[entry.request_id], entry.position)
        for join in plan.joins:
            state = self.states[join.request_id]
            if self.residents.advance(state):
                self._expect_token_from_host(state)
                rows.append((state, None))
        for row in plan.pipelined:
            state = self.states[row.request_id]
            self.residents.arrive(state)
            if row.request_id in output.lost:
                self.preempt(state)
            else:
                self._expect_token_from_host(state)
                rows.append((state, None))
        self._in_flight[plan.step_id] = rows

    def _expect_token(self, state: RequestState) -> None:
        if state.expect_token(self.limits.max_model_len):
            self._let_go(state, Phase.ENDING)

    def _expect_token_from_host(self, state: RequestState) -> None:
        state.num_computed_tokens += 1
        self._expect_token(state)

    def settle(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for state, chunk in self._in_flight.pop(plan.step_id):
            request_id = state.request_id
            if self.states.get(request_id) is not state:
                continue  # it has ended; the id may be another request's
            if chunk is None:
                state.num_host_tokens += 1
                self._counters["host_output_tokens"] += 1
            elif chunk.scores is not None and request_id in output.prompt_logprobs:
                state.prompt_logprobs += output.prompt_logprobs[request_id]
                state.num_scored_rows = chunk.start + chunk.scores.first_row + len(chunk.scores.token_ids)
            if chunk is None or chunk.samples or request_id in output.failed:
                self._settle_token(state, output, now_s, outputs)
        return outputs

    def refresh(self, plan: StepPlan) -> StepPlan:
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

        states = self.states
        return dataclasses.replace(
            plan,
            chunks=tuple(tokens(chunk) for chunk in plan.chunks if chunk.request_id in states),
            entries=tuple(token(entry) for entry in plan.entries if entry.request_id in states),
            pipelined=tuple(
                token(row) if isinstance(row, PiggybackEntry) else row
                for row in plan.pipelined
                if row.request_id in states
            ),
        )

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        """A request's first token was sampled, which ends its TTFT; for policies that learn from that."""

    def on_end(self, state: RequestState) -> None:
        """A request ended that had a token: by itself, at a stop string or because its client left; for policies that
        learn from that."""

    def _settle_token(
        self, state: RequestState, output: StepOutput, now_s: float, outputs: list[RequestOutput]
    ) -> None:
        if (message := output.failed.get(state.request_id)) is not None:
            about = {"engine_request_id": state.request_id}
            logger.error("request %s failed: %s", state.request_id, message, extra=about)
            self._end(state)
            outputs.append(state.output(reason=FinishReason.ERROR, stop_reason=message, now_s=now_s))
            return
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        state.last_token_s = now_s
        if state.first_token_s is None:
            state.first_token_s = now_s
            self._prompt_tokens[state.service_class] += state.num_prompt_tokens
            self.on_first_token(state, now_s)
            prompt_logprobs = tuple(state.prompt_logprobs)
            if state.request.sampling.max_tokens == 0:
                self._end(state)
                outputs.append(state.output(prompt_logprobs=prompt_logprobs, reason=FinishReason.LENGTH, now_s=now_s))
                return
        sampled: SampledToken = output.tokens[state.request_id]
        state.put_token(sampled.token_id)
        self._output_tokens[state.service_class] += 1
        reason, stop_reason = state.finish_reason(
            sampled.token_id, self.limits.eos_token_ids, self.limits.max_model_len
        )
        if reason is not None:
            state.drop_pending()  # of a later step in flight
            self.on_end(state)
            self._end(state)
        outputs.append(
            state.output(
                (sampled.token_id,), sampled.logprob, prompt_logprobs=prompt_logprobs, reason=reason,
                stop_reason=stop_reason, now_s=now_s,
            )
        )  # fmt: skip

    # -- what others ask -----------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        is_copying = self.checkpoints is not None and self.checkpoints.busy
        return bool(self.states or self.moving or self.abandoned_moves or self.draining or is_copying)

    def stats(self) -> SchedulerStats:
        waiting, running = dict.fromkeys(self._classes, 0), dict.fromkeys(self._classes, 0)
        for state in self.states.values():
            (waiting if state.phase is Phase.WAITING else running)[state.service_class] += 1
        blocks = {tier: dict.fromkeys(self._classes, 0) for tier in Tier}
        for state in (*self.states.values(), *self._ended()):
            for tier, held in blocks.items():
                held[state.service_class] += self.kv.num_held(state.request_id, tier)
        return SchedulerStats(
            waiting=waiting,
            running=running,
            device_blocks=blocks[Tier.DEVICE],
            host_blocks=blocks[Tier.HOST],
            host_requests=len(self.residents.queue),
            output_tokens=dict(self._output_tokens),
            prompt_tokens=dict(self._prompt_tokens),
            host_output_tokens=self._counters["host_output_tokens"],
            preemptions=self._counters["preemptions"],
            preempted_tokens=self._counters["preempted_tokens"],
            layer_preemptions=self._counters["layer_preemptions"],
            swaps_out=self._counters["swaps_out"],
            swaps_in=self._counters["swaps_in"],
            checkpoints=self.checkpoints.num_blocks_copied if self.checkpoints is not None else 0,
            resumed_tokens=self._counters["resumed_tokens"],
            rejected=dict(self._rejected),
        )

    def _ended(self) -> Iterator[RequestState]:
        """Yield the requests that have ended, but whose KV a copy or a host task still uses."""
        yield from (state for state, _ in self.moving.values() if state.phase is Phase.DRAINING)
        yield from self.draining.values()

    def check_integrity(self) -> None:
        """Verify the class's invariants and the KV manager's; for tests and debugging.

        Raises:
            AssertionError: With what does not fit.
        """
        self.kv.check_integrity()
        for state in self.states.values():
            homes = {
                Phase.WAITING: state in self.waiting[state.kind],
                Phase.DEVICE: state in self.device[state.kind],
                Phase.HOST: state in self.residents.queue,
                Phase.MOVING: any(other is state for other, _ in self.moving.values()),
                Phase.ENDING: state.phase is Phase.ENDING,
            }
            assert [phase for phase, home in homes.items() if home] == [state.phase], (state.request_id, homes)
            holds = self.kv.num_blocks(state.request_id)
            assert (holds == 0) == (state.phase in (Phase.WAITING, Phase.ENDING)), (
                state.request_id,
                state.phase,
                holds,
            )
            pending = state.token_ids.count(PENDING_TOKEN)
            assert pending == state.num_pending_tokens <= len(self._in_flight), (state.request_id, pending)
            may_hold, must_hold = state.phase in (Phase.HOST, Phase.MOVING), state.phase is Phase.HOST
            assert may_hold if state.slot >= 0 else not must_hold, (state.request_id, state.phase, state.slot)
        held = self.residents.num_slots_used
        on_host = sum(s.slot >= 0 for s in (*self.states.values(), *self._ended()))
        assert held == on_host, f"{held} slots are taken, {on_host} requests hold one"

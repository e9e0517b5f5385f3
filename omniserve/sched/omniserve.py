"""``omniserve``: LS first, BE in what is left of the time, BE decodes without room on the device run on the host tier.

The policy asks the latency model through ``StepCost``, the step as it grows:

1. LS decodes (``_decode_ls``) go in, whatever they take. The shortest of their TPOTs is S_d (with ``slack="deadline"``
   each token has a deadline instead, and a request ahead of it lends its lead).
2. LS prefill (``_prefill_ls``) goes in up to S_d, the largest chunk that fits found by search (``step_cost.largest``).
3. BE work (``_run_be``) has a bound of its own (``_best_effort_bound``): S_d with more headroom, so that decodes run
   ahead and can lend to prompts, the TTFT that waiting LS prompts still have left, and what a new LS request could bear
   if it came as the step begins (``ttft.py``). If host results wait, device BE work leaves them their time.
4. Piggyback rows (``host_rows``) come last, from the lowest layer up, in as many seats as bring most BE work a second
   (``step_cost.choose``).

With several stages, LS requests in other steps count for both bounds: they wait for this step in each stage. A step
without LS work has some BE work in any case. A prompt that alone takes longer than its class's TTFT has that scaled,
goes on in steps that a newcomer can bear, and behind those that can still be in time (``RequestState.prefill_key``).
Each plan carries its ``Decision``: prediction, bound, the bound's source, and what was left out and why.
``--trace-steps`` writes it down (``latency/trace.py``), and ``python -m omniserve.explain`` reads it.

Classes are a list, highest priority first, each of kind LS or BE. Queues are by kind, and inside by (class, arrival).

Paper: omniserve 3.3.2 (order), 3.3.3 (admission), 3.3.4 (chunk sizes), 3.3.5 (offload), 3.3.6 (piggyback control),
3.2.4 (delayed swap-in). Without a forecast nothing bounds a step's time, and no request is rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, ClassVar

from omniserve.core.plan import Bound, LeftOut, StepPlan
from omniserve.core.request import SLO, Request
from omniserve.kv.base import Tier
from omniserve.sched.admission import Admission
from omniserve.sched.batch import Batch, HostRows
from omniserve.sched.best_effort_mix import BestEffortMix
from omniserve.sched.options import CoServingOptions, HostTierOptions
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import (
    BE_HEADROOM,
    LS_HEADROOM,
    TTFT_HEADROOM,
    PiggybackPlan,
    StepCost,
    TimeBound,
    choose,
    decision_of,
    fill,
    largest,
    left_out,
    seat_bucket,
    tpot_bound,
    ttft_left_s,
)
from omniserve.sched.tier_moves import TierMoves
from omniserve.sched.ttft import MIN_LS_CHUNK, LSQueue, TTFTEstimator, TTFTPrediction

if TYPE_CHECKING:
    from omniserve.sched.deferral import Deferral

# BE work that a step without LS work has at least, whatever the bound: an idle machine works.
MIN_BE_CHUNK = 16


@SCHEDULERS.register("omniserve")
class OmniServePolicy(Policy):
    """LS decode, LS chunked prefill, BE decode, BE chunked prefill, then piggyback rows, lowest layer first.

    The paper has BE prefill before BE decode (3.3.2; ``be_order="prefill"``). With more BE prompts than the device can
    prefill, decodes then never find time and are offloaded, where a token takes a step a layer: output comes many
    minutes later, and not more of it but where GPU memory is short (docs/reproduction.md). For the same reason a BE
    decode that finds no time waits on the device; the paper sends it to the host (3.3.5), as ``offload_for_time`` does.
    ``omniserve-paper`` follows the paper in all of this.
    """

    predicts = True
    options_type: ClassVar[type[HostTierOptions]] = CoServingOptions
    options: CoServingOptions
    offloads = True
    ls_headroom, be_headroom = LS_HEADROOM, BE_HEADROOM

    def set_up(self) -> None:
        forecast, slack = self.forecast, self.options.slack
        self._ttft = TTFTEstimator(forecast, self.limits, slack) if forecast is not None else None
        self._admission = Admission(forecast, refuses=self.options.admission) if forecast is not None else None
        self._moves = TierMoves(self.requests, self.options, forecast)
        self._max_rows = self.options.most_rows(self.limits)
        self._mix = BestEffortMix()
        self._deferral: Deferral | None = None
        if self.options.defer_classes and forecast is not None:
            from omniserve.sched.deferral import Deferral

            self._deferral = Deferral(self.requests, forecast, slack)
        self._without_memory: RequestState | None = None
        """The BE prompt for which the last step had time, but no memory."""

    def on_arrival(self, state: RequestState, now_s: float) -> float | None:
        """Predict the time to first token of an LS request (3.3.3), and reject it if that is too long."""
        if state.kind is BE:
            self._mix.note_arrival(state)
        if self._ttft is None or self._admission is None or state.kind is not LS:
            return None
        prediction = self._predict_ttft(self._ttft, state, now_s)
        self._admission.scale(state, prediction)
        if state.has_scaled_ttft:  # it may be computed after those before it that are not long
            prediction = self._predict_ttft(self._ttft, state, now_s)
        # What it will have waited before a step can have it.
        waited_s = max(0.0, now_s - state.arrival_s) + (self.begin_s(now_s) - now_s)
        elsewhere_s = self.requests.loads.expected_s(state)
        state.predicted_here_s = waited_s + prediction.expected_s
        self._ttft.note(state)
        self._admission.judge(
            state,
            prediction,
            now_s=now_s,
            waited_s=waited_s,
            is_idle=self.requests.is_only_ls(state),
            elsewhere_s=elsewhere_s,
        )
        if elsewhere_s is not None and elsewhere_s < prediction.expected_s:
            state.soonest_ttft_s = None  # the margin learns from what is computed here
            return waited_s + elsewhere_s
        return waited_s + prediction.expected_s

    def _predict_ttft(self, estimator: TTFTEstimator, state: RequestState, now_s: float) -> TTFTPrediction:
        device, waiting = self.requests.device, self.requests.waiting
        loading = (other for other in self.requests.loads if other.kind is LS)
        in_line = (other for other in itertools.chain(device[LS], waiting[LS], loading) if other is not state)
        ahead = [s for s in in_line if not s.decodes and s.prefill_key < state.prefill_key]
        queue = self._ls_queue([other for other in device[LS] if other.decodes], ahead)
        return estimator.predict(
            state,
            queue,
            now_s,
            has_best_effort=bool(waiting[BE] or device[BE]),
            host_works=self.requests.residents.is_busy,
            coming=self.requests.coming(state),
        )

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        if self._admission is not None and state.kind is LS:
            self._admission.learn(state, now_s)

    def on_end(self, state: RequestState) -> None:
        if state.kind is BE:
            self._mix.note_end(state)
        if self._ttft is not None and state.kind is LS:
            self._ttft.note_end(state)

    def schedule(self, now_s: float) -> StepPlan:
        cost = self.forecast.step(host_works=self.requests.residents.is_busy) if self.forecast is not None else None
        batch, begin_s = Batch(self.requests, now_s, cost=cost), self.begin_s(now_s)
        self._give_place()
        deferred = self._deferral.waiting(begin_s) if self._deferral is not None else frozenset()
        decoding = self._decode_ls(batch, deferred)
        # Those that other steps have wait for this one, too.
        elsewhere = [state for state in self.requests.device[LS].hidden() if state.decodes]
        s_d, s_be = (
            tpot_bound(decoding + elsewhere, begin_s, self.options.slack, share)
            for share in (self.ls_headroom, self.be_headroom)
        )
        unfinished, kept_out = self._prefill_ls(batch, s_d, decoding, begin_s, deferred)
        if deferred and not batch.chunks:
            self._go_on(batch, deferred)
            unfinished = [state for state in unfinished if not batch.samples(state)]
        still = [s.request_id for s in self.requests.device[LS] if s.request_id in deferred and s not in batch]
        kept_out += left_out("LS deferred", len(still), Bound.DEFERRED, still[0] if still else "")
        ls_s = cost.seconds() if cost is not None else None
        bound = self._best_effort_bound(batch, s_be, decoding, unfinished, begin_s)
        device_bound_s = max(0.0, bound.seconds - self.reserve_for_host_rows(batch, bound.seconds))
        kept_out += self._run_be(batch, device_bound_s)
        self._moves.swap_back(batch, device_bound_s, nothing_left_out=not kept_out)
        rows = self.host_rows(batch, bound.seconds)
        preemptible = self._deferral.preemptible(batch) if self._deferral is not None else frozenset[str]()
        decision = decision_of(cost, ls_s, bound, kept_out + rows.left_out)
        plan = batch.plan(host_rows=rows, preemptible=preemptible, decision=decision)
        if self._deferral is not None:
            self._deferral.note_step(plan, begin_s, host_works=self.requests.residents.is_busy)
        return plan

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        """Let rows of lower classes leave the running step for a request that is late otherwise (omniserve 6)."""
        if self._deferral is None or self._admission is None:
            return frozenset()
        required_s = math.inf
        if slo.ttft_s is not None:
            required_s = (1 - max(TTFT_HEADROOM, self._admission.margin)) * slo.ttft_s - waited_s
        return self._deferral.to_preempt(request, required_s, now_s)

    # -- latency-sensitive ---------------------------------------------------------------------------------------

    def _give_place(self) -> None:
        """Take the place of the last LS request for the first in line, if that is of a higher class and all places are
        taken."""
        first = self.requests.waiting[LS].first
        if first is None or not self.requests.memory.is_full(LS):
            return
        last = next((s for s in reversed(self.requests.device[LS]) if s.phase is Phase.DEVICE), None)
        if last is not None and last.priority_key[0] > first.priority_key[0]:
            self.requests.preempt(last)

    def _decode_ls(self, batch: Batch, deferred: Set[str]) -> list[RequestState]:
        """Schedule all LS decodes but deferred ones; return those that are in."""
        for state in self.requests.device[LS]:
            if state.phase is Phase.DEVICE and state.decodes and state.request_id not in deferred:
                batch.run_or_preempt(state, (BE, LS))
        return [state for state in self.requests.device[LS] if state in batch]

    def _prefill_ls(
        self, batch: Batch, s_d: TimeBound, decoding: Sequence[RequestState], begin_s: float, deferred: Set[str]
    ) -> tuple[list[RequestState], tuple[LeftOut, ...]]:
        """Schedule LS prefill under S_d (3.3.4), in the order of ``prefill_key``.

        Returns:
            The requests with prefill left after this step, and what to note of those that are not in it.
        """
        admitted = [state for state in self.requests.device[LS] if not state.decodes]
        bound_s, min_tokens, is_full, memory_is_short = s_d.seconds, MIN_LS_CHUNK, False, False
        unfinished: list[RequestState] = []
        last_refusal: Bound | None = None
        for state in sorted([*admitted, *self.requests.waiting[LS]], key=lambda s: s.prefill_key):
            if is_full or state.request_id in deferred or (memory_is_short and state.phase is Phase.WAITING):
                unfinished.append(state)
                continue
            within_s = bound_s
            if state.has_scaled_ttft and self.forecast is not None and self.forecast.predictor.has_seen(1):
                # A long prompt goes on in steps that a short one could wait for.
                within_s = min(within_s, self._newcomer_bound_s(batch, decoding, s_d.seconds, begin_s))
            refused_by = self._prefill_one(batch, state, within_s, min_tokens, begin_s)
            if refused_by is None:
                min_tokens = 0
            else:
                last_refusal = refused_by
                is_full = refused_by in (Bound.TIME, Bound.TOKENS)
                memory_is_short |= not is_full
            if not batch.samples(state):
                unfinished.append(state)
            elif batch.cost is not None and (left_s := ttft_left_s(state, begin_s)) >= batch.cost.seconds():
                # None behind it may make its first token late, if it can still be in time.
                bound_s = min(bound_s, left_s)
        kept_out = [
            s for s in unfinished if s not in batch and s.request_id not in deferred and s.phase is not Phase.MOVING
        ]
        first_id = kept_out[0].request_id if kept_out else ""
        return unfinished, left_out("LS prefill", len(kept_out), last_refusal, first_id)

    def _prefill_one(
        self, batch: Batch, state: RequestState, bound_s: float, min_tokens: int, begin_s: float
    ) -> Bound | None:
        if state.phase is Phase.DEVICE:
            if self._deferral is not None and self._deferral.waits_for_time(batch, state, bound_s, begin_s):
                return Bound.TIME
            return batch.run_or_preempt(state, (BE, LS), bound_s=bound_s, min_tokens=min_tokens)
        _, refused_by = batch.chunk_size(state, bound_s=bound_s, min_tokens=min_tokens)
        if refused_by is not None:
            return refused_by
        self._moves.make_room_for_ls(batch, state)
        return batch.admit(state, bound_s=bound_s, min_tokens=min_tokens)

    def _go_on(self, batch: Batch, deferred: Set[str]) -> None:
        """Schedule what was deferred for prompts that are not in the step: there is no memory for them."""
        for state in self.requests.device[LS]:
            if state.request_id in deferred and state.phase is Phase.DEVICE:
                batch.run_or_preempt(state, (BE, LS))

    def _ls_queue(self, decoding: Sequence[RequestState], prompts: Sequence[RequestState]) -> LSQueue:
        requests = self.requests
        held = {state.request_id: self.kv.num_blocks(state.request_id) for state in requests.device[LS]}
        of_ls = sum(held.values()) - sum(map(requests.prefixes.num_shared_at_begin, requests.device[LS]))
        of_be = sum(self.kv.num_blocks(state.request_id) for state in requests.device[BE])
        of_be += sum(len(move.src_block_ids) for move in requests.memory.moves_to_host)
        free = self.kv.num_free(Tier.DEVICE)
        # Blocks that several requests share count for each, so those of BE requests are no more than all others.
        num_free = free + min(of_be, max(0, self.kv.num_device_blocks - free - of_ls))
        return LSQueue(
            decoding, prompts, held, num_free, self.limits.config.max_num_seqs - requests.memory.num_admitted(LS)
        )

    # -- bounds --------------------------------------------------------------------------------------------------

    def _best_effort_bound(
        self,
        batch: Batch,
        s_be: TimeBound,
        decoding: Sequence[RequestState],
        unfinished: Sequence[RequestState],
        begin_s: float,
    ) -> TimeBound:
        """Return what BE work may lengthen the step to: no TPOT or TTFT may suffer, nor a newcomer's (3.3.4)."""
        if batch.cost is None or self._ttft is None:
            return TimeBound()
        ls_s, bound = batch.cost.seconds(), s_be
        for state in self.requests.device[LS]:
            if state in batch and batch.samples(state) and state.num_output_tokens == 0:
                bound = bound.or_tighter(max(ttft_left_s(state, begin_s), ls_s), f"ttft of {state.request_id}")
        if unfinished:
            queue = self._ls_queue(decoding, unfinished)
            for request_id, left_s in self._ttft.prompt_bounds(queue, batch, s_be.seconds, begin_s):
                bound = bound.or_tighter(max(left_s, ls_s), f"ttft of {request_id}")
        newcomer_s = self._newcomer_bound_s(batch, decoding, s_be.seconds, begin_s)
        bound = bound.or_tighter(newcomer_s, "ttft of a new request")
        if batch.cost.features.is_empty:
            # No LS work: the machine is never left idle because its smallest step is too long for a newcomer.
            least_s = batch.cost.seconds_with(0, MIN_BE_CHUNK, samples=True)
            bound = TimeBound(max(bound.seconds, least_s), bound.by)
        return bound

    def _newcomer_bound_s(
        self, batch: Batch, decoding: Sequence[RequestState], bound_s: float, begin_s: float
    ) -> float:
        """Return the longest step after which a new request can keep its TTFT; infinite if nothing predicts that."""
        if self._ttft is None or self._admission is None:
            return math.inf
        return self._ttft.newcomer_bound_s(
            decoding, bound_s, margin=self._admission.margin, busy_s=begin_s - batch.now_s
        )

    def reserve_for_host_rows(self, batch: Batch, bound_s: float) -> float:
        """Return d w, the time that device BE work leaves for results that wait.

        Paper: OmniServe 3.3.4. Its text gives the stricter bound to steps *without* results; it means the others.
        """
        residents = self.requests.residents
        joinable = residents.num_joinable(residents.expected(has_device_rows=True))
        if batch.cost is None or not any(joinable):
            return 0.0
        entries = self._num_entries()
        seats = seat_bucket(max(entries, *joinable), self.limits.config.max_piggyback_seats)
        with_rows_s = batch.cost.seconds_after(
            lambda step: fill(step, entries, joinable, seats=seats, max_rows=self._max_rows)
        )
        return with_rows_s - batch.cost.seconds()

    # -- best-effort ---------------------------------------------------------------------------------------------

    def _run_be(self, batch: Batch, bound_s: float) -> tuple[LeftOut, ...]:
        """Schedule BE work on the device in the order of ``be_order``; return what to note of work that is kept out."""
        if self.options.be_order == "decode":
            self._make_room_for_be(batch, self._without_memory)
            kept_out = self._decode_be(batch, bound_s)
            kept_out_prefill, self._without_memory = self._prefill_be(batch, bound_s)
            return kept_out + kept_out_prefill
        kept_out, without_memory = self._prefill_be(batch, bound_s)
        self._make_room_for_be(batch, without_memory)
        return kept_out + self._decode_be(batch, bound_s)

    def _prefill_be(self, batch: Batch, bound_s: float) -> tuple[tuple[LeftOut, ...], RequestState | None]:
        """Schedule BE prefill up to the bound; a prompt that is cut short ends it: no crumbs follow.

        Returns:
            What to note of prompts that are kept out, and the first of them if memory is what it lacks.
        """
        waiting, waiting_be = self.requests.waiting, self.requests.waiting_be
        admitted = [state for state in self.requests.device[BE] if not state.decodes]
        for number, state in enumerate(admitted):
            refused_by = batch.add(state, bound_s=bound_s, min_tokens=self._min_be_tokens(batch))
            if refused_by is not None:  # not for memory: it holds all its blocks since its first chunk
                return left_out("BE prefill", len(admitted) - number, refused_by, state.request_id), None
            if not batch.samples(state):
                return (), None
        if waiting[LS]:
            return (), None  # a BE prompt must not take the memory that an LS one waits for
        for state in waiting_be.by_prefix() if self.options.be_prefix_order else waiting_be:
            reserve = self.requests.memory.reserve_for_ls(state)
            refused_by = batch.admit(
                state, bound_s=bound_s, min_tokens=self._min_be_tokens(batch), reserve_blocks=reserve
            )
            if refused_by is not None:
                kept_out = left_out("BE prefill", len(waiting_be), refused_by, state.request_id)
                return kept_out, state if refused_by is Bound.MEMORY else None
            if state.phase is not Phase.MOVING and not batch.samples(state):
                break  # what is copied back takes nothing of the step
        return (), None

    @staticmethod
    def _min_be_tokens(batch: Batch) -> int:
        return 0 if batch.chunks else MIN_BE_CHUNK

    def _make_room_for_be(self, batch: Batch, state: RequestState | None) -> None:
        if state is not None and state.phase is Phase.WAITING and not self.requests.waiting[LS]:
            self._moves.make_room_for_be(batch, state)

    def _decode_be(self, batch: Batch, bound_s: float) -> tuple[LeftOut, ...]:
        """Schedule BE decodes up to the bound, oldest first; those that find no memory move to the host tier."""
        decodes = [state for state in self.requests.device[BE] if state.decodes and state not in batch]
        within = self._num_within(batch, decodes, bound_s)
        kept_out: tuple[LeftOut, ...] = ()
        out_of_time: list[RequestState] = []
        for number, state in enumerate(decodes):
            if batch.tokens_left == 0 or number >= within:
                bound = Bound.TOKENS if batch.tokens_left == 0 else Bound.TIME
                rest = [s for s in decodes[number:] if s.phase is Phase.DEVICE and s not in batch]
                kept_out += left_out("BE decode", len(rest), bound, rest[0].request_id if rest else "")
                out_of_time = rest if bound is Bound.TIME else []
                break
            if state.phase is not Phase.DEVICE:
                continue
            refused_by = self._moves.run_or_offload(batch, state)
            if refused_by is not None and state.phase is Phase.DEVICE:
                kept_out += left_out("BE decode", 1, refused_by, state.request_id)
        self._offload_for_time(batch, out_of_time)
        return kept_out

    def _offload_for_time(self, batch: Batch, kept_out: Sequence[RequestState]) -> None:
        """Offload decodes that the bound keeps out of this step (3.3.5)."""
        if self.options.offload_for_time:
            self._moves.offload_for_time(batch, kept_out)

    def _num_within(self, batch: Batch, decodes: Sequence[RequestState], bound_s: float) -> int:
        """Return how many decodes, from the first on, the bound lets in (3.3.5); one at least if nothing else runs."""
        most = min(len(decodes), batch.tokens_left)
        if batch.cost is None or self.forecast is None or bound_s == math.inf or most == 0:
            return len(decodes)
        cost, shape = batch.cost, self.forecast.shape
        contexts = list(itertools.accumulate(state.num_computed_tokens for state in decodes[:most]))
        keys = list(itertools.accumulate(shape.keys_seen(state.num_computed_tokens, 1) for state in decodes[:most]))

        def seconds(count: int) -> float:
            last = count - 1
            return cost.seconds_after(lambda step: step.add_decodes(count, contexts[last], keys[last], samples=count))

        within = largest(seconds, most, bound_s)
        return max(within, 0 if batch.chunks else 1)

    # -- host tier -----------------------------------------------------------------------------------------------

    def _num_entries(self) -> int:
        """Return how many host residents have a token that may enter."""
        return self.requests.residents.num_at_token_boundary if self.requests.host_is_up else 0

    def _be_work(self, batch: Batch) -> float:
        """Return the BE work of the step's chunks in output tokens: a decode is one, a prompt token its value."""
        states = self.requests.states
        chunks = [chunk for chunk in batch.chunks if states[chunk.request_id].kind is BE]
        decodes = sum(states[chunk.request_id].decodes for chunk in chunks)
        prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks if not states[chunk.request_id].decodes)
        return decodes + self._mix.prompt_token_value * prompt_tokens

    def host_rows(self, batch: Batch, bound_s: float) -> HostRows:
        """Choose entries and joins: as many seats and rows as pay beside other BE work, lowest layer first (3.3.6)."""
        residents, most_rows = self.requests.residents, self._max_rows
        num_entries, most_seats = self._num_entries(), self.limits.config.max_piggyback_seats
        if not (num_entries or any(residents.num_ready) or batch.chunks):
            return HostRows()  # no step is begun for results that may not come
        expected = residents.expected(has_device_rows=bool(batch.chunks))
        joinable = residents.num_joinable(expected)
        if not num_entries and not any(joinable):
            return HostRows()
        if batch.cost is None:
            chosen = PiggybackPlan(most_seats, most_rows)
        else:
            if not batch.chunks:
                one_row_s = batch.cost.seconds_after(
                    lambda step: fill(step, num_entries, joinable, seats=1, max_rows=1)
                )
                bound_s = max(bound_s, one_row_s)
            chosen = self._choose_rows(batch, num_entries, joinable, bound_s)
        allowed = min(num_entries, chosen.seats, chosen.rows)
        entries = residents.plan_entries(self.requests.host_blocks_for, allowed) if allowed else []
        joins = residents.plan_joins(chosen.rows - len(entries), chosen.seats, expected) if chosen.seats else []
        bound = Bound.TIME if chosen.rows < min(most_rows, sum(joinable) + num_entries) else Bound.SEATS
        # Those at a token boundary were asked in turn until the seats were taken: fewer entries lack host blocks.
        entry_bound = Bound.HOST_MEMORY if len(entries) < allowed else bound
        kept_out = left_out("piggyback entry", num_entries - len(entries), entry_bound)
        kept_out += left_out("piggyback join", sum(joinable) - len(joins), bound)
        rows = HostRows(entries=entries, joins=joins, max_rows=most_rows, left_out=kept_out)
        if batch.cost is not None:
            self.put_piggyback(batch.cost, rows)
        return rows

    def _choose_rows(self, batch: Batch, num_entries: int, joinable: Sequence[int], bound_s: float) -> PiggybackPlan:
        """Return how many rows a step takes within the bound, and in how many seats."""
        assert batch.cost is not None
        return choose(
            batch.cost,
            num_entries,
            joinable,
            bound_s=bound_s,
            max_seats=self.limits.config.max_piggyback_seats,
            max_rows=self._max_rows,
            be_work=self._be_work(batch),
        )

    def put_piggyback(self, cost: StepCost, rows: HostRows) -> None:
        """Add the rows that were really taken: an entry without host blocks stays out."""
        per_layer = [0] * self.limits.num_layers
        for join in rows.joins:
            per_layer[join.layer] += 1
        seats, max_rows = self.limits.config.max_piggyback_seats, self._max_rows
        fill(cost, len(rows.entries), per_layer, seats=seats, max_rows=max_rows)

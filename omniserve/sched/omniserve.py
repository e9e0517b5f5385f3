"""``omniserve``: LS first, BE in what is left of the time, BE decodes that find no room on the host tier.

Paper: omniserve 3.3.2 (order), 3.3.3 (admission), 3.3.4 (chunk sizes), 3.3.5 (offload), 3.3.6 (piggyback control),
3.2.4 (delayed swap-in). Without a forecast nothing bounds a step's time, and nobody is rejected.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from omniserve.core.plan import (
    Bound,
    LeftOut,
    StepPlan,
)
from omniserve.core.request import SLO, Request
from omniserve.kv.base import KVManager, Tier
from omniserve.sched.admission import AdmissionMargin
from omniserve.sched.base import SCHEDULERS, SchedulerLimits
from omniserve.sched.batch import Batch
from omniserve.sched.bounds import BE_HEADROOM, LS_HEADROOM, TimeBound, decision_of, tpot_bound, ttft_left_s
from omniserve.sched.load import Forecast, StepLoad, largest
from omniserve.sched.piggyback import PiggybackPlan, choose, fill, seat_bucket
from omniserve.sched.policy import BE, LS, HostRows, RequestScheduler
from omniserve.sched.state import Phase, RequestState
from omniserve.sched.tier_moves import TierMoves
from omniserve.sched.ttft import MIN_LS_CHUNK, LSMemory, Prefill, TTFTForecast

# BE work that a step without LS work has at least, whatever the bound: an idle machine works.
MIN_BE_CHUNK = 16


@SCHEDULERS.register("omniserve")
class OmniServeScheduler(RequestScheduler):
    """LS decode, LS chunked prefill, BE decode, BE chunked prefill, then piggyback rows, lowest layer first.

    The paper has BE prefill before BE decode (3.3.2; ``be_order="prefill"``). With more BE prompts than the device can
    prefill, decodes then never find time, are offloaded, and need a step a layer: in the simulator 0.03 to 0.32 of the
    BE output of ``sarathi``, but more than it where GPU memory is short (docs/reproduction.md). For the same reason a
    BE decode that finds no time waits on the device; the paper sends it to the host (3.3.5), as ``offload_for_time``
    does: there, 0.24 to 0.26 of the output in longer runs of Yi-34B under a heavy LS load.
    """

    predicts = True
    offloads = True

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager, forecast: Forecast | None = None) -> None:
        super().__init__(limits=limits, kv=kv, forecast=forecast)
        self._ttft = TTFTForecast(forecast, limits) if forecast is not None else None
        self._margin = AdmissionMargin()
        self._moves = TierMoves(self)
        self._left_out: list[LeftOut] = []
        self._without_memory: RequestState | None = None
        """The BE prompt for which the last step had time, but no memory."""

    def add(
        self, request_id: str, request: Request, slo: SLO, now_s: float, *, arrival_s: float | None = None
    ) -> float | None:
        predicted_s = soonest_s = None
        rank, kind = self._classes[request.service_class]
        if self._ttft is not None and kind is LS:
            waited_s = 0.0 if arrival_s is None else max(0.0, now_s - arrival_s)
            self._ttft.note(len(request.prompt_token_ids), slo.ttft_s)
            predicted_s, soonest_s = self._predict_ttft(rank, request, slo, waited_s, now_s)
        super().add(request_id, request, slo, now_s, arrival_s=arrival_s)
        state = self.states[request_id]
        state.predicted_ttft_s, state.soonest_ttft_s = predicted_s, soonest_s
        return predicted_s

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        if state.soonest_ttft_s is not None and state.slo.ttft_s is not None:
            self._margin.learn(
                predicted_s=state.soonest_ttft_s, actual_s=now_s - state.arrival_s, required_s=state.slo.ttft_s
            )

    def on_end(self, state: RequestState) -> None:
        if self._ttft is not None and state.kind is LS:
            self._ttft.note_end(state)

    def schedule(self, now_s: float) -> StepPlan:
        load = self.forecast.load(host_works=self.residents.is_busy) if self.forecast is not None else None
        batch = Batch(self.kv, self.limits.max_step_tokens, load)
        self._moves.begin_step(now_s)
        self._left_out = []
        decoding = self._decode_ls(batch)
        begin_s = self.begin_s(now_s)
        s_d, s_be = (tpot_bound(decoding, begin_s, self.limits.slack, share) for share in (LS_HEADROOM, BE_HEADROOM))
        unfinished = self._prefill_ls(batch, s_d, begin_s)
        ls_s = load.seconds() if load is not None else None
        bound = self._best_effort_bound(batch, s_be, decoding, unfinished, now_s)
        device_bound_s = max(0.0, bound.seconds - self.reserve_for_host_rows(batch, bound.seconds))
        tokens_before = batch.tokens_left
        decodes_first = self.limits.be_order == "decode"
        if not decodes_first:
            self._prefill_be(batch, device_bound_s)
        self._make_room_for_be(batch)
        self._decode_be(batch, device_bound_s)
        if decodes_first:
            self._prefill_be(batch, device_bound_s)
        self._moves.swap_back(batch, device_bound_s, nothing_left_out=not self._left_out)
        rows = self.host_rows(batch, bound.seconds, tokens_before - batch.tokens_left)
        decision = decision_of(load, ls_s, bound, self._left_out)
        return self.make_plan(batch, now_s, host_rows=rows, moves=self._moves.moves, decision=decision)

    def leave_out(self, work: str, states: Sequence[RequestState] | int, first: str, bound: Bound | None) -> None:
        """Note what stays out of the step, and why."""
        count = states if isinstance(states, int) else len(states)
        if count > 0:
            self._left_out.append(
                LeftOut(work=work, num_requests=count, first_request_id=first, bound=bound or Bound.ORDER)
            )

    # -- latency-sensitive ---------------------------------------------------------------------------------------

    def _decode_ls(self, batch: Batch) -> list[RequestState]:
        """Schedule all LS decodes; return those that are in."""
        for state in self.device[LS]:
            if state.phase is Phase.DEVICE and state.decodes:
                self.run_or_preempt(batch, state, (BE, LS))
        return [state for state in self.device[LS] if state in batch]

    def _prefill_ls(self, batch: Batch, s_d: TimeBound, begin_s: float) -> list[RequestState]:
        """Schedule LS prefill under S_d (3.3.4), best class and oldest first; return whose prefill is not over then."""
        admitted = [state for state in self.device[LS] if not state.decodes]
        bound_s, min_tokens, is_full, memory_is_short = s_d.seconds, MIN_LS_CHUNK, False, False
        unfinished: list[RequestState] = []
        waiting = iter(self.waiting[LS])
        for state in heapq.merge(admitted, waiting, key=lambda s: s.place):
            if is_full or (memory_is_short and state.phase is Phase.WAITING):
                unfinished.append(state)
                continue
            if self._prefill_one(batch, state, bound_s, min_tokens):
                min_tokens = 0
                if batch.samples(state):
                    # Nobody behind it may make its first token late, if it can still be in time.
                    left_s = ttft_left_s(state, begin_s)
                    if batch.load is not None and left_s >= batch.load.seconds():
                        bound_s = min(bound_s, left_s)
                else:
                    unfinished.append(state)
                continue
            unfinished.append(state)
            if batch.refused_by in (Bound.TIME, Bound.TOKENS):
                is_full = True
            else:
                memory_is_short = True
        kept_out = [state for state in unfinished if state not in batch]
        if kept_out:
            self.leave_out("LS prefill", kept_out, kept_out[0].request_id, batch.refused_by)
        return unfinished

    def _prefill_one(self, batch: Batch, state: RequestState, bound_s: float, min_tokens: int) -> bool:
        if state.phase is Phase.DEVICE:
            return self.run_or_preempt(batch, state, (BE, LS), bound_s=bound_s, min_tokens=min_tokens)
        if state.request_id not in self.states or not batch.chunk_size(state, bound_s=bound_s, min_tokens=min_tokens):
            return False
        self._moves.make_room_for_ls(batch, state)
        return self.admit(batch, state, bound_s=bound_s, min_tokens=min_tokens)

    def _predict_ttft(
        self, rank: int, request: Request, slo: SLO, waited_s: float, now_s: float
    ) -> tuple[float, float]:
        """Return the time to first token that a new request would have (3.3.3): as expected, and at the soonest.

        Raises:
            RequestRejected: It is longer than the objective.
        """
        assert self._ttft is not None
        ahead = [s for s in itertools.chain(self.device[LS], self.waiting[LS]) if not s.decodes and s.place[0] <= rank]
        decoding = [s for s in self.device[LS] if s.decodes]
        has_best_effort = bool(len(self.waiting[BE]) or len(self.device[BE]))
        prompt = Prefill(0, len(request.prompt_token_ids), 1 + request.num_rows_to_score)
        prediction = self._ttft.predict(
            ahead, decoding, prompt, slo=slo, waited_s=waited_s, has_best_effort=has_best_effort,
            host_works=self.residents.is_busy, memory=self._ls_memory(), now_s=now_s,
        )  # fmt: skip
        margin = self._margin.share
        waited_s += self.begin_s(now_s) - now_s  # what it will have waited before a step can have it
        if self.limits.admission and slo.ttft_s is not None and not prediction.meets(slo.ttft_s, waited_s, margin):
            self._rejected[request.service_class] += 1
            raise prediction.rejection(slo.ttft_s, waited_s, margin)
        return waited_s + prediction.expected_s, waited_s + prediction.soonest_s

    def _ls_memory(self) -> LSMemory:
        free = self.kv.num_free(Tier.DEVICE) + self.blocks_moving_out
        free += sum(self.kv.num_blocks(state.request_id) for state in self.device[BE])
        return LSMemory({s.request_id: self.kv.num_blocks(s.request_id) for s in self.device[LS]}, free)

    # -- bounds --------------------------------------------------------------------------------------------------

    def _best_effort_bound(
        self,
        batch: Batch,
        s_be: TimeBound,
        decoding: Sequence[RequestState],
        unfinished: Sequence[RequestState],
        now_s: float,
    ) -> TimeBound:
        """Return what BE work may lengthen the step to: nobody's TPOT or TTFT may suffer, nor a newcomer's (3.3.4)."""
        if batch.load is None or self._ttft is None:
            return TimeBound()
        ls_s, begin_s = batch.load.seconds(), self.begin_s(now_s)
        bound = s_be
        for state in self.device[LS]:
            if state in batch and batch.samples(state) and state.num_output_tokens == 0:
                bound = bound.or_tighter(max(ttft_left_s(state, begin_s), ls_s), f"ttft of {state.request_id}")
        if unfinished:
            for state, rest_s, num_steps in self._ttft.rest(
                unfinished, batch, decoding, s_be.seconds, self._ls_memory()
            ):
                # Where memory is what it waits for, so many steps come before its own.
                left_s = (ttft_left_s(state, begin_s) - rest_s) / (1 + num_steps)
                bound = bound.or_tighter(max(left_s, ls_s), f"ttft of {state.request_id}")
        newcomer_s = self._ttft.newcomer_bound_s(decoding, s_be.seconds, self._margin.share, busy_s=begin_s - now_s)
        bound = bound.or_tighter(newcomer_s, "ttft of a new request")
        if batch.load.is_empty:
            # No LS work: the machine is never left idle because its smallest step is too long for a newcomer.
            trial = batch.load.copy()
            trial.add_chunk(0, MIN_BE_CHUNK, samples=True)
            bound = TimeBound(max(bound.seconds, trial.seconds()), bound.by)
        return bound

    def reserve_for_host_rows(self, batch: Batch, bound_s: float) -> float:
        """Return d w, the time that device BE work leaves for results that wait.

        Paper: OmniServe 3.3.4, whose text gives the stricter bound to steps *without* results; it means the others.
        """
        if batch.load is None:
            return 0.0
        ready = self.residents.num_ready
        if not any(ready):
            return 0.0
        entries = self.residents.num_at_token_boundary if self.host_is_up else 0
        seats = seat_bucket(max(entries, *ready), self.limits.max_piggyback_slots)
        trial = batch.load.copy()
        fill(trial, entries, ready, seats=seats, max_rows=self.max_piggyback_rows)
        return trial.seconds() - batch.load.seconds()

    # -- best-effort ---------------------------------------------------------------------------------------------

    def _prefill_be(self, batch: Batch, bound_s: float) -> None:
        """Schedule BE prefill up to the bound; a prompt that is cut short ends it: no crumbs follow."""
        admitted = [state for state in self.device[BE] if not state.decodes]
        for number, state in enumerate(admitted):
            if not self._add_be(batch, state, bound_s):  # it holds all its blocks since its first chunk
                self.leave_out("BE prefill", len(admitted) - number, state.request_id, batch.refused_by)
                return
            if not batch.samples(state):
                return
        if self.waiting[LS]:
            return  # a BE prompt must not take the memory that an LS one waits for
        for state in self.waiting[BE]:
            reserve = self.reserve_for_ls(state)
            min_tokens = 0 if batch.chunks else MIN_BE_CHUNK
            if self.admit(batch, state, bound_s=bound_s, min_tokens=min_tokens, reserve_blocks=reserve):
                if state.phase is Phase.MOVING or batch.samples(state):
                    continue  # what is copied back takes nothing of the step
                return
            self.leave_out("BE prefill", len(self.waiting[BE]), state.request_id, batch.refused_by)
            if batch.refused_by is Bound.MEMORY:
                self._without_memory = state
            return

    def _make_room_for_be(self, batch: Batch) -> None:
        """Offload decodes, before they run, for a BE prompt that the last step had time but no memory for (3.3.5)."""
        state, self._without_memory = self._without_memory, None
        if state is None or state.phase is not Phase.WAITING or self.waiting[LS]:
            return
        shortage = self.blocks_for(state) + self.reserve_for_ls(state) - self.kv.num_free(Tier.DEVICE)
        self._moves.offload_until(shortage - self.blocks_moving_out, batch)

    def _add_be(self, batch: Batch, state: RequestState, bound_s: float) -> bool:
        return batch.add(state, bound_s=bound_s, min_tokens=0 if batch.chunks else MIN_BE_CHUNK)

    def _decode_be(self, batch: Batch, bound_s: float) -> None:
        decodes = [state for state in self.device[BE] if state.decodes and state not in batch]
        within = self._num_within(batch, decodes, bound_s)
        for number, state in enumerate(decodes):
            if batch.tokens_left == 0 or number >= within:
                bound = Bound.TOKENS if batch.tokens_left == 0 else Bound.TIME
                rest = [s for s in decodes[number:] if s.phase is Phase.DEVICE and s not in batch]
                if rest:
                    self.leave_out("BE decode", rest, rest[0].request_id, bound)
                self._moves.offload_for_time(rest if bound is Bound.TIME else [])
                return
            if state.phase is not Phase.DEVICE:
                continue
            if not self._moves.run_or_offload(batch, state) and state.phase is Phase.DEVICE:
                self.leave_out("BE decode", 1, state.request_id, Bound.MEMORY)
        self._moves.offload_for_time([])

    def _num_within(self, batch: Batch, decodes: Sequence[RequestState], bound_s: float) -> int:
        """Return how many decodes, from the first on, the bound lets in (3.3.5); one at least if nothing else runs."""
        most = min(len(decodes), batch.tokens_left)
        if batch.load is None or self.forecast is None or bound_s == math.inf or most == 0:
            return len(decodes)
        load, shape = batch.load, self.forecast.shape
        contexts = list(itertools.accumulate(state.num_computed_tokens for state in decodes[:most]))
        loads = list(itertools.accumulate(shape.load(state.num_computed_tokens, 1) for state in decodes[:most]))

        def seconds(count: int) -> float:
            trial = load.copy()
            trial.add_decodes(count, contexts[count - 1], loads[count - 1], num_sampled=count)
            return trial.seconds()

        within = largest(seconds, most, bound_s)
        return max(within, 0 if batch.chunks else 1)

    # -- host tier -----------------------------------------------------------------------------------------------

    def host_rows(self, batch: Batch, bound_s: float, device_tokens: int) -> HostRows:
        """Choose entries and joins: as many seats and rows as pay, lowest layer first (3.3.6).

        Args:
            batch: The step's device rows.
            bound_s: Longest step.
            device_tokens: Device rows of it that are best effort.
        """
        ready = self.residents.num_ready
        num_entries = self.residents.num_at_token_boundary if self.host_is_up else 0
        most_seats = self.limits.max_piggyback_slots
        if not num_entries and not any(ready):
            return HostRows()
        if batch.load is None:
            chosen = PiggybackPlan(most_seats, self.max_piggyback_rows)
        else:
            if not batch.chunks:
                trial = batch.load.copy()
                fill(trial, num_entries, ready, seats=1, max_rows=1)
                bound_s = max(bound_s, trial.seconds())
            chosen = choose(
                batch.load, num_entries, ready, bound_s=bound_s, max_seats=most_seats, max_rows=self.max_piggyback_rows,
                device_tokens=device_tokens,
            )  # fmt: skip
        allowed = min(chosen.seats, chosen.rows)
        entries = self.residents.plan_entries(self.host_blocks_for, min(num_entries, allowed)) if allowed else []
        joins = self.residents.plan_joins(chosen.rows - len(entries), chosen.seats) if chosen.seats else []
        bound = Bound.TIME if chosen.rows < min(self.max_piggyback_rows, sum(ready) + num_entries) else Bound.SEATS
        # Who stands at a token boundary has been asked in turn until the seats were taken.
        lacks_blocks = len(entries) < min(num_entries, allowed)
        entry_bound = Bound.HOST_MEMORY if lacks_blocks else bound
        if num_entries > len(entries):
            self.leave_out("piggyback entry", num_entries - len(entries), "", entry_bound)
        if sum(ready) > len(joins):
            self.leave_out("piggyback join", sum(ready) - len(joins), "", bound)
        rows = HostRows(entries=entries, joins=joins)
        if batch.load is not None:
            self.put_piggyback(batch.load, rows)
        return rows

    def put_piggyback(self, load: StepLoad, rows: HostRows) -> None:
        """Tell a load what was really taken: an entry without host blocks stays out."""
        per_layer = [0] * self.limits.num_layers
        for join in rows.joins:
            per_layer[join.layer] += 1
        fill(
            load, len(rows.entries), per_layer, seats=self.limits.max_piggyback_slots, max_rows=self.max_piggyback_rows
        )

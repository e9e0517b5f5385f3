"""``llumnix``: part of the KV memory is kept for LS; BE requests that find none decode on the host tier.

Paper: omniserve 2.1 and 5.1.3, baseline A: Llumnix on the GPU, a vLLM on the CPUs for the BE requests that it cannot
accommodate. Performance is isolated by memory alone: BE requests leave ``ls_reserve_blocks`` free, LS ones take them
and then the memory of BE requests. No step's time is bounded, nobody is rejected, no latency model is asked.

Departures: this engine has no dense modules on the CPU, so an overflowed request is prefilled on the device and only
its decode attention is on the host tier; its rows join the device's steps, as many as find a seat, lowest layer first.
A BE prompt that finds no memory therefore has the youngest BE decodes move out. Who moved stays to its end, as a
request that was sent to the other vLLM does. Llumnix's migration between instances has no place on one device. Without
a host tier BE requests wait, or are recomputed.
"""

from __future__ import annotations

from omniserve.core.plan import Bound, StepPlan
from omniserve.kv.base import KVManager, Tier
from omniserve.sched.base import SCHEDULERS, SchedulerLimits
from omniserve.sched.batch import Batch
from omniserve.sched.load import Forecast
from omniserve.sched.policy import BE, LS, HostRows, RequestScheduler
from omniserve.sched.tier_moves import TierMoves


@SCHEDULERS.register("llumnix")
class LlumnixScheduler(RequestScheduler):
    """LS, then BE beside the LS reserve, decodes before prefills, then all piggyback rows that find a seat."""

    offloads = True

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager, forecast: Forecast | None = None) -> None:
        super().__init__(limits=limits, kv=kv, forecast=forecast)
        self._moves = TierMoves(self)

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        self._moves.begin_step(now_s)
        self.run_admitted(batch, LS, victims=(BE, LS))
        self._admit_ls(batch)
        self._run_be(batch)
        if not self.waiting[LS]:  # a BE prompt must not take the memory that an LS one waits for
            self._admit_be(batch)
        seats, max_rows = self.limits.max_piggyback_slots, self.max_piggyback_rows
        max_entries = min(seats, max_rows) if self.host_is_up else 0
        entries = self.residents.plan_entries(self.host_blocks_for, max_entries)
        joins = self.residents.plan_joins(max_rows - len(entries), seats)
        return self.make_plan(batch, now_s, host_rows=HostRows(entries=entries, joins=joins), moves=self._moves.moves)

    def _admit_ls(self, batch: Batch) -> None:
        for state in self.waiting[LS]:
            if self.admit(batch, state):
                continue
            if batch.refused_by is not Bound.MEMORY:
                return
            self._moves.make_room_for_ls(batch, state)
            if not self.admit(batch, state):
                return

    def _run_be(self, batch: Batch) -> None:
        for state in self.runnable(batch, BE):
            self._moves.run_or_offload(batch, state)

    def _admit_be(self, batch: Batch) -> None:
        for state in self.waiting[BE]:
            reserve = self.reserve_for_ls(state)
            if self.admit(batch, state, reserve_blocks=reserve):
                continue
            if batch.refused_by is Bound.MEMORY:
                shortage = self.blocks_for(state) + reserve - self.kv.num_free(Tier.DEVICE)
                self._moves.offload_until(shortage - self.blocks_moving_out, batch)
            return

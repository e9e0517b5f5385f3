"""``llumnix``: part of the KV memory is kept for LS; BE requests that find none decode on the host tier.

Paper: omniserve 2.1 and 5.1.3, baseline A: Llumnix on the GPU, a vLLM on the CPUs for the BE requests that it cannot
accommodate. Performance is isolated by memory alone: BE requests leave ``ls_reserve_blocks`` free, LS ones take them
and then the memory of BE requests. No step's time is bounded, no request is rejected, no latency model is used.

Departures: this engine has no dense modules on the CPU, so an overflowed request is prefilled on the device and only
its decode attention is on the host tier; its rows join the device's steps, as many as find a seat, lowest layer first.
A BE prompt that finds no memory therefore has the youngest BE decodes move out. A request that moved stays there to its
end, as one that was sent to the other vLLM does. Llumnix's migration between instances has no place on one device.
Without a host tier BE requests wait, or are recomputed.
"""

from __future__ import annotations

from omniserve.core.plan import Bound, StepPlan
from omniserve.kv.base import Tier
from omniserve.sched.batch import Batch, HostRows
from omniserve.sched.options import HostTierOptions
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import BE, LS
from omniserve.sched.tier_moves import TierMoves


@SCHEDULERS.register("llumnix")
class LlumnixPolicy(Policy):
    """LS, then BE beside the LS reserve, decodes before prefills, then all piggyback rows that find a seat."""

    options_type = HostTierOptions
    options: HostTierOptions
    offloads = True

    def set_up(self) -> None:
        self._moves = TierMoves(self.requests, self.options, self.forecast)
        self._max_rows = self.options.most_rows(self.limits)

    def schedule(self, now_s: float) -> StepPlan:
        batch, requests = Batch(self.requests, now_s), self.requests
        batch.run_admitted(LS, victims=(BE, LS))
        self._admit_ls(batch)
        for state in batch.runnable(BE):
            self._moves.run_or_offload(batch, state)
        if not requests.waiting[LS]:  # a BE prompt must not take the memory that an LS one waits for
            self._admit_be(batch)
        seats, max_rows = self.limits.config.max_piggyback_seats, self._max_rows
        max_entries = min(seats, max_rows) if requests.host_is_up else 0
        entries = requests.residents.plan_entries(requests.host_blocks_for, max_entries)
        joins = requests.residents.plan_joins(max_rows - len(entries), seats)
        return batch.plan(host_rows=HostRows(entries=entries, joins=joins))

    def _admit_ls(self, batch: Batch) -> None:
        for state in self.requests.waiting[LS]:
            refused_by = batch.admit(state)
            if refused_by is Bound.MEMORY:
                self._moves.make_room_for_ls(batch, state)
                refused_by = batch.admit(state)
            if refused_by is not None:
                return

    def _admit_be(self, batch: Batch) -> None:
        for state in self.requests.waiting[BE]:
            reserve = self.requests.reserve_for_ls(state)
            refused_by = batch.admit(state, reserve_blocks=reserve)
            if refused_by is Bound.MEMORY:
                shortage = self.requests.blocks_for(state) + reserve - self.kv.num_free(Tier.DEVICE)
                self._moves.offload_until(batch, shortage - self.requests.blocks_moving_out)
            if refused_by is not None:
                return

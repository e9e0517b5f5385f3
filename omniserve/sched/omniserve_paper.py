"""``omniserve-paper``: the policy of the OmniServe paper to the letter (3.3.2 to 3.3.6), to compare others with.

``omniserve`` follows the same ideas with what turned out better; here is what the paper says and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.sched.admission import Admission
from omniserve.sched.batch import Batch
from omniserve.sched.omniserve import MIN_BE_CHUNK, OmniServePolicy
from omniserve.sched.options import CoServingOptions, HostTierOptions
from omniserve.sched.policy import SCHEDULERS
from omniserve.sched.state import LS, RequestState
from omniserve.sched.step_cost import PiggybackPlan, TimeBound, rows_within, seat_bucket
from omniserve.sched.ttft import TTFTPrediction


@dataclass(frozen=True, kw_only=True)
class PaperOptions(HostTierOptions):
    """Options of ``omniserve-paper``."""

    admission: bool = True
    """Reject LS requests that are predicted to miss their TTFT (3.3.3)."""


@SCHEDULERS.register("omniserve-paper")
class OmniServePaperPolicy(OmniServePolicy):
    """LS decode, LS prefill, BE prefill, BE decode, then piggyback rows greedily from the lowest layer up.

    What it does otherwise than ``omniserve``: the paper's order (3.3.2); a first token is predicted by one step with
    all LS prefill at once (3.3.3); a step is bounded by the decoding objective itself, with no share of it kept back,
    none lent between tokens and none kept for an LS request that may come (3.3.4); every BE decode for which a step has
    no time goes to the host tier at once (3.3.5); rows of all layers are admitted, the lowest first, until the bound is
    reached, in as many seats as the fullest layer needs (3.3.6).

    Errata: in 3.3.3 n(t) has l_j - p_j where the remaining prompt p_j - l_j is meant; in 3.3.4 the bound less w, the
    time of the piggyback rows, is meant for steps with results in the output queue, not for those without.

    Departures: what is refused by that prediction, and which objectives are scaled, follows docs/admission.md. LS
    prefill goes on by 16 tokens a step, and BE work in a step without LS work, even if the bound lets in none. Where
    both tiers are one CPU, no decode is offloaded for time. A request moves back as with ``omniserve``
    (3.2.4 gives no numbers).
    """

    options_type = PaperOptions
    ls_headroom = be_headroom = 0.0

    def set_up(self) -> None:
        self.options = CoServingOptions(
            **dataclasses.asdict(self.options),
            be_order="prefill",
            be_prefix_order=False,
            offload_for_time=True,
            slack="step",
        )
        super().set_up()
        self._ttft = None
        if self.forecast is not None:
            self._admission = Admission(self.forecast, refuses=self.options.admission, has_margin=False)

    def on_arrival(self, state: RequestState, now_s: float) -> float | None:
        """Predict the time to first token of an LS request by one step with all LS work (3.3.3)."""
        if self.forecast is None or self._admission is None or state.kind is not LS:
            return super().on_arrival(state, now_s)
        everything, alone, at_best = self.forecast.step(), self.forecast.step(), self.forecast.step(at_best=True)
        for step in (alone, at_best):
            step.add_chunk(0, state.num_prompt_tokens, samples=True)
        for other in (*self.requests.device[LS], *self.requests.waiting[LS]):
            if other.decodes:
                everything.add_chunk(other.num_computed_tokens, 1, samples=True)
            else:
                everything.add_chunk(other.num_computed_tokens, other.num_uncomputed_tokens, samples=True)
        step_s = everything.seconds()
        prediction = TTFTPrediction(
            soonest_s=step_s,
            expected_s=step_s,
            idle_s=alone.seconds(),
            best_s=at_best.seconds(),
            num_prompt_tokens=state.num_prompt_tokens,
            step_rows=everything.features.device_rows,
        )
        waited_s = max(0.0, now_s - state.arrival_s) + (self.begin_s(now_s) - now_s)
        self._admission.scale(state, prediction)
        self._admission.judge(
            state, prediction, now_s=now_s, waited_s=waited_s, is_idle=self.requests.is_only_ls(state)
        )
        return waited_s + step_s

    def _best_effort_bound(
        self,
        batch: Batch,
        s_be: TimeBound,
        decoding: Sequence[RequestState],
        unfinished: Sequence[RequestState],
        begin_s: float,
    ) -> TimeBound:
        """Return S_d, and no more than the prefill objective leaves LS prompts (3.3.4)."""
        if batch.cost is None:
            return TimeBound()
        ls_s, bound = batch.cost.seconds(), s_be
        first = [s for s in self.requests.device[LS] if batch.samples(s) and s.num_output_tokens == 0]
        for state in (*first, *unfinished):
            if state.slo.ttft_s is not None:
                left_s = state.arrival_s + state.slo.ttft_s - begin_s
                bound = bound.or_tighter(max(left_s, ls_s), f"ttft of {state.request_id}")
        if batch.cost.features.is_empty:
            bound = TimeBound(max(bound.seconds, batch.cost.seconds_with(0, MIN_BE_CHUNK, samples=True)), bound.by)
        return bound

    def _offload_for_time(self, batch: Batch, kept_out: Sequence[RequestState]) -> None:
        if kept_out and self._moves.can_offload_for_time:
            for state in reversed(kept_out):
                self._moves.offload(batch, state)

    def _choose_rows(self, batch: Batch, num_entries: int, joinable: Sequence[int], bound_s: float) -> PiggybackPlan:
        most, max_rows = self.limits.config.max_piggyback_seats, self._max_rows
        seats = seat_bucket(min(max(num_entries, *joinable), max_rows), most)
        assert batch.cost is not None
        rows, _ = rows_within(batch.cost, num_entries, joinable, seats=seats, max_rows=max_rows, bound_s=bound_s)
        return PiggybackPlan(seats, rows) if rows else PiggybackPlan()

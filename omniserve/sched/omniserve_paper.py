"""``omniserve-paper``: the policy of the OmniServe paper, as near to its text as can be (3.3.2 to 3.3.6).

It is there to compare others with: ``omniserve`` follows the same ideas with what turned out better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omniserve.sched.admission import Admission
from omniserve.sched.batch import Batch
from omniserve.sched.best_effort import BestEffortWork
from omniserve.sched.co_serving import CoServingPolicy, CoServingStep
from omniserve.sched.options import HostTierOptions
from omniserve.sched.piggyback import GreedySeats, PiggybackChoice
from omniserve.sched.state import LS, RequestState
from omniserve.sched.step_cost import Forecast, StepCost, TimeBound
from omniserve.sched.tier_moves import TierMoves
from omniserve.sched.ttft import TTFTPrediction
from omniserve.sched.view import RequestView


@dataclass(frozen=True, kw_only=True)
class PaperOptions(HostTierOptions):
    """Options of ``omniserve-paper``."""

    admission: bool = True
    """Reject LS requests that are predicted to miss their TTFT (3.3.3)."""


class OmniServePaperPolicy(CoServingPolicy):
    """LS decode, LS prefill, BE prefill, BE decode, then piggyback rows greedily from the lowest layer up.

    What it does otherwise than ``omniserve``: the paper's order (3.3.2); a first token is predicted by one step with
    all LS prefill at once, whose prompts count in decode attention, too (3.3.3); a step is bounded by S_d, a constant
    of the service, with no share of it kept back, none lent between tokens and none kept for an LS request that may
    come (3.3.4); the TTFT of an LS prompt bounds BE work alone, not the LS prompts behind it (3.3.4); every BE decode
    for which a step has no time goes to the host tier at once (3.3.5); rows of all layers are admitted, the lowest
    first, until the bound is reached, in as many seats as the fullest layer needs (3.3.6).

    Errata: in 3.3.3 n(t) has l_j - p_j where the remaining prompt p_j - l_j is meant; in 3.3.4 the bound less w, the
    time of the piggyback rows, is meant for steps with results in the output queue, not for those without. In the c_DA
    of 3.3.3 the 1 of ``l_j + 1`` is read as a part of the sum, as each decode sees its own key.

    Departures, and why: what is refused by that prediction, and which objectives are scaled, follows docs/admission.md
    (the paper has one TTFT and refuses whatever misses it, also on an idle machine, so that a long prompt is never
    served). LS prefill goes on by 16 tokens a step, and BE work in a step without LS work, even if the bound lets in
    none: else an objective shorter than the shortest step stops all. S_d is the shortest of the objectives that there
    are, as classes and requests may have several; a class's TPOT counts as it was given, also where admission has
    scaled it for requests, so that BE work then runs in steps without LS work alone. The TTFT of an LS prompt bounds BE
    decodes and host rows, too; in the paper it bounds BE prompts alone. Where both tiers are one CPU, no decode is
    offloaded for time: the host tier would take the cores that the step lacks. A request moves back as with
    ``omniserve`` (3.2.4 gives no numbers). BE requests leave LS ones a share of the memory (``ls_reserve_fraction``),
    and predictions follow what steps take (``correct_model``); the paper has neither.
    """

    options_type = PaperOptions
    options: PaperOptions

    def set_up(self) -> None:
        view, options, forecast = self.view, self.options, self.forecast
        control = PaperControl(view, forecast, refuses=options.admission) if forecast is not None else None
        moves, max_rows = TierMoves(view, options, forecast), options.most_rows(self.limits)
        best_effort = BestEffortWork(view, moves, OffloadAtOnce(moves), order="prefill", by_prefix=False)
        seats = GreedySeats(max_seats=self.limits.config.max_piggyback_seats, max_rows=max_rows)
        self.step = CoServingStep(view, ServiceTPOT(view), control, best_effort, PiggybackChoice(view, max_rows, seats))


class ServiceTPOT:
    """Bounds every step by the shortest TPOT of the service, whether an LS request decodes in it or not (3.3.4).

    A ``StepBounds``. The TPOTs are those of the LS classes, and of the LS requests that have not ended, each less the
    share ``headroom``.
    """

    def __init__(self, view: RequestView, headroom: float = 0.0) -> None:
        self._view, self._of_classes = view, TimeBound()
        self._share = 1 - headroom
        for spec in view.limits.config.classes:
            if spec.kind is LS and spec.slo.tpot_s is not None:
                self._of_classes = self._of_classes.or_tighter(spec.slo.tpot_s, f"tpot of class {spec.name}")

    def of(self, decoding: Iterable[RequestState], begin_s: float) -> tuple[TimeBound, TimeBound]:
        """Return S_d twice: LS prefill and BE work have the same bound."""
        s_d = self._of_classes
        for state in self._view.states.values():
            if state.kind is LS and state.slo.tpot_s is not None:
                s_d = s_d.or_tighter(state.slo.tpot_s, f"tpot of {state.request_id}")
        s_d = TimeBound(self._share * s_d.seconds, s_d.by)
        return s_d, s_d


class PaperControl:
    """Predicts a TTFT by one step with all LS work, and bounds BE work by the objectives themselves.

    A ``LatencyControl`` (3.3.3, 3.3.4).
    """

    margin = 0.0
    deadlines = None

    def __init__(self, view: RequestView, forecast: Forecast, *, refuses: bool) -> None:
        self._view, self._forecast = view, forecast
        self._admission = Admission(forecast, refuses=refuses, has_margin=False)

    def on_arrival(self, state: RequestState, now_s: float, begin_s: float) -> float:
        """Predict the time to first token of an LS request by one step with all LS work (3.3.3)."""
        everything, alone, at_best = self.all_ls_work(), self._forecast.step(), self._forecast.step(at_best=True)
        for step in (alone, at_best):
            add_prompt(step, 0, state.num_prompt_tokens)
        step_s = everything.seconds()
        prediction = TTFTPrediction(
            soonest_s=step_s,
            expected_s=step_s,
            idle_s=alone.seconds(),
            best_s=at_best.seconds(),
            num_prompt_tokens=state.num_prompt_tokens,
            step_rows=everything.features.device_rows,
        )
        waited_s = max(0.0, now_s - state.arrival_s) + (begin_s - now_s)
        self._admission.scale(state, prediction)
        is_idle = self._view.is_only_ls(state)
        self._admission.judge(state, prediction, now_s=now_s, waited_s=waited_s, is_idle=is_idle)
        return waited_s + step_s

    def soonest_s(self, states: Sequence[RequestState], now_s: float, begin_s: float) -> list[float]:
        """Return the TTFT that each of these requests would have if it came now: one step with all LS work and it."""
        seconds = []
        for state in states:
            step = self.all_ls_work()
            add_prompt(step, 0, state.num_prompt_tokens)
            seconds.append(begin_s - now_s + step.seconds())
        return seconds

    def admittable_per_s(self, now_s: float, begin_s: float) -> dict[str, float]:
        """Return nothing: one step with all LS work says nothing of requests one after another."""
        return {}

    def all_ls_work(self) -> StepCost:
        """Return one step with all LS decodes, and all that is left of LS prompts."""
        step = self._forecast.step()
        for state in (*self._view.device[LS].everyone(), *self._view.waiting[LS].everyone()):
            if state.decodes:
                step.add_chunk(state.num_computed_tokens, 1, samples=True)
            else:
                add_prompt(step, state.num_computed_tokens, state.num_uncomputed_tokens)
        return step

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        """Learn from an LS request's first token."""
        self._admission.learn(state, now_s)

    def on_end(self, state: RequestState) -> None:
        """Learn nothing: the prediction knows no lengths of outputs."""

    def first_token_bound_s(self, state: RequestState, begin_s: float) -> float:
        """Return infinity: LS prompts are bounded by S_d alone."""
        return math.inf

    def long_prompt_bound_s(
        self, batch: Batch, decoding: Sequence[RequestState], bound_s: float, begin_s: float
    ) -> float:
        """Return infinity: a long prompt takes what other prompts take."""
        return math.inf

    def best_effort_bound(
        self,
        batch: Batch,
        s_be: TimeBound,
        decoding: Sequence[RequestState],
        unfinished: Sequence[RequestState],
        begin_s: float,
    ) -> TimeBound:
        """Return S_d, and no more than the prefill objective leaves LS prompts (3.3.4)."""
        assert batch.cost is not None
        ls_s, bound = batch.cost.seconds(), s_be
        first = [s for s in self._view.device[LS] if batch.samples(s) and s.num_output_tokens == 0]
        for state in (*first, *unfinished):
            if state.slo.ttft_s is not None:
                left_s = state.arrival_s + state.slo.ttft_s - begin_s
                bound = bound.or_tighter(max(left_s, ls_s), f"ttft of {state.request_id}")
        return bound


def add_prompt(step: StepCost, start: int, count: int) -> None:
    """Add what is left of a prompt as 3.3.3 counts it: its rows in c_PA, and once more, as one decode, in c_DA and g.

    Its last row is that decode, so n grows by ``count``.
    """
    features, shape = step.features, step.shape
    step.add_decodes(1, start, shape.keys_seen(start, 1), samples=1)
    features.prefill_tokens += count - 1
    features.prefill_context += start
    features.prefill_load += shape.keys_seen(start, count)


class OffloadAtOnce:
    """Offloads every decode for which a step has no time (3.3.5; an ``OffloadForTime``)."""

    def __init__(self, moves: TierMoves) -> None:
        self._moves = moves

    def __call__(self, batch: Batch, kept_out: Sequence[RequestState]) -> None:
        if kept_out and self._moves.can_offload_for_time:
            for state in reversed(kept_out):
                self._moves.offload(batch, state)

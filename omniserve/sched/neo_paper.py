"""``neo-paper``: NEO as the OmniServe paper has it: all decodes attend on the host tier, those of LS requests, too.

Sources: omniserve 5.1.3 (baseline B) and 5.2.1; NEO (Jiang et al., MLSys 2025), section 4. ``neo`` keeps LS requests on
the device. For what a second sub-batch is, see ``StepPlan.pipelined``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from omniserve.core.plan import PiggybackEntry
from omniserve.sched.batch import Batch
from omniserve.sched.best_effort import BestEffortWork
from omniserve.sched.co_serving import CoServingPolicy, CoServingStep
from omniserve.sched.host_rows import HostRows
from omniserve.sched.omniserve_paper import PaperControl, ServiceTPOT, add_prompt
from omniserve.sched.options import HostTierOptions, PolicyOptions
from omniserve.sched.second_batch import SecondBatch
from omniserve.sched.state import BE, LS, Phase
from omniserve.sched.step_cost import LS_HEADROOM, StepCost, largest
from omniserve.sched.tier_moves import TierMoves
from omniserve.sched.view import RequestView

_HALF = 0.5
"""Share of the host rows that are in the first sub-batch: the host attends for one half while the device computes the
other."""


@dataclass(frozen=True, kw_only=True)
class NEOPaperOptions(PolicyOptions):
    """Options of ``neo-paper``."""

    admission: bool = True
    """Reject LS requests that are predicted to miss their TTFT, by a step in which the host tier attends for all LS
    decodes. Paper: omniserve 3.3.3; its experiments have objectives and rates at which none is rejected (5.2)."""


class NEOPaperPolicy(CoServingPolicy):
    """Prompts on the device, all decodes in two sub-batches whose attention is the host tier's (omniserve 5.1.3).

    As soon as a request decodes, of either class, its KV moves to the host tier, and stays there. In each step its
    token passes all layers: "while the CPU processes the Attention for one micro-batch of requests", the device
    computes the other one. The first has the prompts, too; half of the decodes are there unless the step is shorter
    without them. "A latency control mechanism similar to OmniServe's" keeps the objectives: the bounds of
    ``omniserve-paper``. All LS decodes are in each step, up to ``max_num_seqs``; LS prompts are added within S_d, then
    BE prompts, then BE decodes. Admission predicts by a step whose LS decodes wait for the host, so that it knows the
    host's speed.

    Departures, and why: LS comes before BE, which NEO does not tell apart: without that an objective would mean
    nothing. KV moves to the host as a whole when a prompt is computed, beside the next step, and not layer by layer
    while it is. So the first decode of a request comes a step later, and S_d is 3 % less than the TPOT to make up for
    that. In a step without prompts all decodes are in one sub-batch, as the engine has no first one without device
    rows. What the host tier has no room for decodes on the device, and all that is on a host which fails is recomputed
    there. NEO's choice between a step with host rows and one without is left out, as decodes are nowhere else: BE
    decodes are in as far as the bound lets them. LS prefill goes on by 16 tokens a step, and one BE row in a step
    without other work, as with ``omniserve-paper``.
    """

    options_type = NEOPaperOptions
    options: NEOPaperOptions
    offloads_ls = True
    awaits_host = True

    def set_up(self) -> None:
        view, forecast = self.view, self.forecast
        control = HostControl(view, forecast, refuses=self.options.admission) if forecast is not None else None
        self.moves = MovesToHost(view, HostTierOptions(), forecast)
        self.rows = HostDecodes(view)
        best_effort = BestEffortWork(view, self.moves, None, order="prefill", by_prefix=False)
        self.step = CoServingStep(view, ServiceTPOT(view, LS_HEADROOM), control, best_effort, self.rows)

    def begin(self, batch: Batch) -> None:
        """Send decodes to the host tier, and put those of LS requests that are there into the step."""
        self.moves.offload_decodes(batch)
        self.rows.decode_ls(batch)


class MovesToHost(TierMoves):
    """Moves each request to the host tier when it decodes, and none back."""

    def offload_decodes(self, batch: Batch) -> None:
        """Begin to move all decodes on the device, LS ones first; what finds no room stays."""
        for kind in (LS, BE):
            for state in self._view.device[kind]:
                if state.phase is Phase.DEVICE and state.decodes and not self.offload(batch, state):
                    return

    def swap_back(self, batch: Batch, bound_s: float, *, nothing_left_out: bool) -> None:
        """Do nothing: the attention of decodes is the host's, however light the load is."""


class HostDecodes:
    """Chooses the rows of both sub-batches that decode: all LS residents of the host tier, then BE ones in the bound.

    Half of them are in the first sub-batch, beside the prompts, if the step is no longer for that; without prompts
    there is no first sub-batch. A ``HostRowChoice``; ``decode_ls`` comes before the step's device rows.
    """

    def __init__(self, view: RequestView) -> None:
        most = view.limits.config.max_num_seqs
        self._view = view
        self._ls, self._be = (SecondBatch(view, kinds=(kind,), most=most) for kind in (LS, BE))
        self._ls_rows = HostRows()

    def decode_ls(self, batch: Batch) -> None:
        """Put the LS residents that can run into an empty step: if not all, then the first by class and arrival."""
        states = self._ls.candidates()
        prompts = itertools.chain(*self._view.waiting.values(), *self._view.device.values())
        self._ls.hybrid_share = _HALF if any(not state.decodes for state in prompts) else 0.0
        self._ls_rows = self._ls.run_through(batch, states, len(states))

    def reserve_s(self, batch: Batch, bound_s: float) -> float:
        """Return the seconds that device work leaves for BE residents."""
        self._be.hybrid_share = _HALF if batch.chunks else 0.0
        return self._be.reserve_s(batch, bound_s)

    def choose(self, batch: Batch, bound_s: float) -> HostRows:
        """Add the BE residents for which the step has time to the LS ones that it has (omniserve 3.3.4)."""
        ls = self._split(batch)
        states, cost = self._be.candidates(), batch.cost
        count = len(states)
        self._be.hybrid_share = _HALF if batch.chunks else 0.0
        if cost is not None and states:
            halved_s = self._be.seconds_with(cost, states)
            self._be.hybrid_share = 0.0
            whole_s = self._be.seconds_with(cost, states)
            if batch.chunks and halved_s <= whole_s:
                self._be.hybrid_share = _HALF
            count = largest(lambda most: self._be.seconds_with(cost, states[:most]), count, bound_s)
            if batch.is_empty:  # an idle machine works, whatever the bound
                count = max(count, 1)
        be = self._be.run_through(batch, states, count)
        return HostRows(pipelined=[*ls.pipelined, *be.pipelined], left_out=ls.left_out + be.left_out)

    def _split(self, batch: Batch) -> HostRows:
        """Return the LS rows of a step that has all its chunks: half of them in the first sub-batch, or none."""
        rows, cost = self._ls_rows, batch.cost
        if batch.chunks:
            if cost is None:
                return rows
            whole = cost.copy()
            whole.features.hybrid_rows = 0
            if cost.seconds() <= whole.seconds():
                return rows
        if cost is not None:
            cost.features.hybrid_rows = 0
        second = [replace(row, is_hybrid=False) if isinstance(row, PiggybackEntry) else row for row in rows.pipelined]
        return replace(rows, pipelined=second)


class HostControl(PaperControl):
    """Predicts a TTFT by one step with all LS work, in which the host tier attends for the LS decodes."""

    def all_ls_work(self) -> StepCost:
        """Return one step with all LS decodes, which the host tier attends for, and all that is left of LS prompts."""
        step = self._forecast.step()
        states = [state for state in self._view.states.values() if state.kind is LS]
        decodes = [(state.num_tokens - 1, 0) for state in states if state.decodes]
        step.add_pipelined(decodes, int(_HALF * len(decodes)))
        for state in states:
            if not state.decodes and state.num_uncomputed_tokens:
                add_prompt(step, state.num_computed_tokens, state.num_uncomputed_tokens)
        return step

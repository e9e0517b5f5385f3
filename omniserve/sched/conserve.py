"""``conserve``: LS first and unbounded, then as many BE tokens as the LS requests' TPOT leaves time for.

Paper: conserve 4.2. Each step has a token budget of its own: LS requests go in without queueing, then BE requests by
``can_schedule(batch, request, TBT)``, which is ``Batch.add`` with a time bound: the most tokens of a request that keep
the predicted step within the objective, or none. A BE decode that does not fit is passed over; the first prompt that is
cut ends the step. A step without LS requests is of the size that brings most tokens a second. Memory that LS requests
need is taken from BE requests on demand; with checkpoints (4.4) their KV goes to the host and comes back beside the
steps (see ``Parking``).

A step with BE rows has safepoints (4.3, Algorithm 1): an LS request that comes while it runs, and would miss its TTFT
if it waited for the step's end, has them leave between two layers. They go on there later, or begin anew as in the
paper (``keep_halted``). There is a safepoint before each layer, in the paper before every fourth (``safepoint_every``).

``conserve-paper`` is the same policy with the paper's choices; it is meant to run with the KV manager ``incremental``
(4.4), and with a profile over a grid of rows and contexts (``python -m omniserve.profile --steps grid``).

Departures of both: the paper has one TBT objective, here it is the shortest TPOT of the unfinished LS requests. Without
a latency model no step is bounded, and BE requests fill the token budget as in ``sarathi``. Evicting and prefetching is
by request with ``tiered`` and by block with ``incremental``, not by token: a request runs only with all of its KV on
the device. No thread watches for arrivals (Algorithm 1): the step asks for them at its safepoints. What a request has
waited counts against its TTFT, too; Algorithm 1 leaves that out.
"""

from __future__ import annotations

import itertools
import math
from typing import final

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Request
from omniserve.sched.batch import Batch
from omniserve.sched.disciplines import runnable
from omniserve.sched.options import ConServeOptions, ConServePaperOptions
from omniserve.sched.parking import Parking
from omniserve.sched.policy import Policy
from omniserve.sched.state import BE, LS, Phase
from omniserve.sched.step_cost import Forecast, TimeBound, decision_of, tpot_bound
from omniserve.sched.ttft import Prefill


class ConServePolicy(Policy):
    """LS, then BE by token within the LS objective; alone, BE in steps of the size with the best throughput."""

    predicts = True
    options_type = ConServeOptions
    options: ConServeOptions
    offloads = True

    def set_up(self) -> None:
        self._parking = Parking(self.view)
        self._step_ends_s = -math.inf
        """Predicted end of the running step, seconds on the scheduler's clock."""
        self._offline: frozenset[str] = frozenset()
        """The running step's BE requests."""
        self._coming: list[Prefill] = []
        """The LS prompts that came while the step ran; they are added after it."""
        self._due_s = math.inf
        """Time at which the first of their first tokens is due."""

    def schedule(self, now_s: float) -> StepPlan:
        view = self.view
        online = [*view.device[LS], *view.waiting[LS]]
        cost, max_tokens = None, None
        if self.forecast is not None:
            cost = self.forecast.step()
            max_tokens = self._best_size(self.forecast) if self.options.best_step_size and not online else None
        batch = self.new_batch(now_s, cost=cost, max_tokens=max_tokens)
        self._serve_ls(batch)
        ls_s = cost.seconds() if cost is not None else None
        bound = tpot_bound(online, now_s, "step", headroom=0.0) if cost is not None else TimeBound()
        self._serve_be(batch, bound.seconds)
        self._parking.bring_back(batch, self.host.queue)
        self._offline = frozenset(c.request_id for c in batch.chunks if view.states[c.request_id].kind is BE)
        plan = batch.plan(decision=decision_of(cost, ls_s, bound))
        predicted_s = plan.decision.predicted_s if plan.decision is not None else None
        self._step_ends_s = self.begin_s(now_s) + (predicted_s or 0.0)
        self._coming, self._due_s = [], math.inf
        return plan

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        if self.forecast is None:
            return frozenset()
        self._coming.append(Prefill(0, len(request.prompt_token_ids), 1 + request.num_rows_to_score))
        if slo.ttft_s is not None:
            self._due_s = min(self._due_s, now_s - waited_s + slo.ttft_s)
        cost = self.forecast.step()  # Q_on, which goes into one step
        for prompt in (*(Prefill.of(s, s.num_computed_tokens) for s in self.view.waiting[LS]), *self._coming):
            cost.add_chunk(prompt.start, prompt.count, samples=prompt.num_logits)
        is_late = max(now_s, self._step_ends_s) + cost.seconds() > self._due_s
        return self._offline if is_late else frozenset()

    def _serve_ls(self, batch: Batch) -> None:
        for state in runnable(batch, self.view, LS):
            self._parking.run(batch, state, (BE, LS))
        for state in self.view.waiting[LS]:
            if self._parking.admit_ls(batch, state) is not None:
                return

    def _serve_be(self, batch: Batch, bound_s: float) -> None:
        """Add BE decodes, each that fits, then prompts in order until one is cut short: no crumbs follow."""
        view = self.view
        decodes = [state for state in view.device[BE] if state.decodes]
        each_s = bound_s
        if batch.cost is not None and bound_s < math.inf:
            together = batch.cost.copy()
            for state in decodes:
                together.add_chunk(state.num_computed_tokens, 1, samples=True)
            if together.seconds() <= bound_s:
                each_s = math.inf  # one prediction for all
        for state in decodes:
            if state.phase is Phase.DEVICE:
                self._parking.run(batch, state, (BE,), bound_s=each_s)
        for state in view.device[BE]:
            if not state.decodes:
                self._parking.run(batch, state, (BE,), bound_s=bound_s)
                if not batch.samples(state):
                    return
        if view.waiting[LS] or self.host.queue:
            return  # their memory is not for newcomers
        for state in view.waiting[BE]:
            if batch.admit(state, bound_s=bound_s) is not None:
                return
            if state.phase is not Phase.MOVING and not batch.samples(state):
                return  # what is copied back takes nothing of the step

    def _best_size(self, forecast: Forecast) -> int:
        """Return how many tokens a step of BE work has at most for the best predicted throughput (offline mode).

        Tried are the powers of two, those between them, and the largest: throughput is flat around its peak.
        """
        most = self.limits.config.max_num_batched_tokens
        best_effort = [*self.view.device[BE], *self.view.waiting[BE]]
        decodes = [state for state in self.view.device[BE] if state.decodes]
        prompts = [state for state in best_effort if not state.decodes]
        best, best_tokens, best_s = most, 0, 1.0
        powers = [1 << i for i in range(most.bit_length())]
        for size in sorted({min(size, most) for power in powers for size in (power, 3 * power)}):
            cost, left = forecast.step(), size
            for state in itertools.chain(decodes, prompts):
                count = min(state.num_uncomputed_tokens, left)
                start = state.num_computed_tokens
                cost.add_chunk(start, count, samples=state.num_logits(start, count))
                left -= count
                if left == 0:
                    break
            seconds = cost.seconds()
            if (size - left) * best_s >= best_tokens * seconds:
                best, best_tokens, best_s = size, size - left, seconds
            if left:
                break
        return best


@final
class ConServePaperPolicy(ConServePolicy):
    """``conserve`` with the paper's choices: its polynomial, work of halted rows is lost, safepoints 4 layers apart.

    Only the defaults of its options differ.
    """

    options_type = ConServePaperOptions
    options: ConServePaperOptions

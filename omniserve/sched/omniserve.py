"""``omniserve``: LS first, BE in what is left of the time, BE decodes without room on the device run on the host tier.

A ``CoServingStep`` asks the latency model through ``StepCost``, the step as it grows:

1. LS decodes go in, whatever they take. The shortest of their TPOTs is S_d (with ``slack="deadline"`` each token has a
   deadline instead, and a request ahead of it lends its lead).
2. LS prefill goes in up to S_d, the largest chunk that fits found by search (``step_cost.largest``).
3. BE work (``best_effort.py``) has a bound of its own (``queueing_control.py``): S_d with more headroom, so that
   decodes run ahead and can lend to prompts, the TTFT that waiting LS prompts still have left, and what a new LS
   request could bear if it came as the step begins (``ttft.py``). If host results wait, device BE work leaves them
   their time.
4. Piggyback rows (``piggyback.py``) come last, from the lowest layer up, in as many seats as bring most BE work a
   second (``SeatsByRate``).

A prompt that alone takes longer than its class's TTFT has that scaled, goes on in steps that a newcomer can bear, and
behind those that can still be in time (``RequestState.prefill_key``). ``--trace-steps`` writes the ``Decision`` of each
plan down (``latency/trace.py``), and ``python -m omniserve.explain`` reads it.

Classes are a list, highest priority first, each of kind LS or BE. Queues are by kind, and inside by (class, arrival).

Paper: omniserve 3.3.2 (order), 3.3.3 (admission), 3.3.4 (chunk sizes), 3.3.5 (offload), 3.3.6 (piggyback control),
3.2.4 (delayed swap-in). Without a forecast nothing bounds a step's time, and no request is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from omniserve.sched.batch import Batch
from omniserve.sched.best_effort import BestEffortWork
from omniserve.sched.co_serving import CoServingPolicy, CoServingStep
from omniserve.sched.options import OmniServeOptions
from omniserve.sched.piggyback import GreedySeats, PiggybackChoice
from omniserve.sched.seats import PiggybackPlan, choose
from omniserve.sched.step_cost import StepCost


@final
class OmniServePolicy(CoServingPolicy):
    """LS decode, LS chunked prefill, BE decode, BE chunked prefill, then piggyback rows, lowest layer first.

    The paper has BE prefill before BE decode (3.3.2; ``be_order="prefill"``). With more BE prompts than the device can
    prefill, decodes then never find time and are offloaded, where a token takes a step a layer: output comes many
    minutes later, and not more of it but where GPU memory is short (docs/reproduction.md). For the same reason a BE
    decode that finds no time waits on the device; the paper sends it to the host (3.3.5), as ``offload_for_time`` does.
    ``omniserve-paper`` follows the paper in all of this.
    """

    options_type = OmniServeOptions
    options: OmniServeOptions

    def set_up(self) -> None:
        view, options, forecast = self.view, self.options, self.forecast
        best_effort, max_rows = BestEffortWork.of(view, options, forecast), options.most_rows(self.limits)
        most = {"max_seats": self.limits.config.max_piggyback_seats, "max_rows": max_rows}
        seats = SeatsByRate(best_effort, **most) if options.seat_objective else GreedySeats(**most)
        self.step = CoServingStep.of(view, options, forecast, best_effort, PiggybackChoice(view, max_rows, seats))


class SeatsByRate:
    """Chooses as many seats and rows as pay beside other BE work (3.3.6; a ``SeatChoice``)."""

    def __init__(self, best_effort: BestEffortWork, *, max_seats: int, max_rows: int) -> None:
        self._best_effort = best_effort
        self._max_seats, self._max_rows = max_seats, max_rows

    def __call__(
        self, batch: Batch, cost: StepCost, num_entries: int, ready: Sequence[int], bound_s: float
    ) -> PiggybackPlan:
        return choose(
            cost,
            num_entries,
            ready,
            bound_s=bound_s,
            max_seats=self._max_seats,
            max_rows=self._max_rows,
            be_work=self._best_effort.value_of(batch),
        )

"""Late joins: results of the host tier that come while a step runs, and which rows of it they let join.

Without a GPU the host looks for them as the step comes to a layer (``LateResults``). A GPU is given all layers of a
step at once and looks for the results itself (``PiggybackRows.receive``); ``MissedJoins`` tells the host which joins
found none.

No step waits for the host tier. A late join whose result has not come leaves its seat empty in that layer, is not sent
to the next layer, and is named in ``StepOutput.missed``; the scheduler then books nothing of it.

Paper: omniserve 3.2.3; apex 3.4 (the device asks before a layer's post-attention whether the results are there).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from omniserve.core.plan import PiggybackJoin, StepOutput, StepPlan, joins_by_layer
from omniserve.core.work import AttentionResult
from omniserve.host.tier import HostTier, result_flag
from omniserve.ops.streams import AsyncHostCopy, upload
from omniserve.runner.layer_loop import HeldEvents, LayerLoop, StepHooks, StepRun
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.step_inputs import LayersOutput, SeatRows


def wanted_flags(joins: Sequence[PiggybackJoin]) -> list[int]:
    """Return ``wanted`` of ``piggyback_receive`` for the seats of a layer's joins.

    0 where the result is there, else its flag for a token, and -1 for its drafts.
    """
    wanted: list[int] = []
    for join in joins:
        if join.is_ready:
            wanted += [0] * join.num_rows
        else:
            wanted += [result_flag(join.epoch, join.layer, join.position), *[-1] * len(join.draft_ids)]
    return wanted


class ResultCheck:
    """Tells which results are there by now."""

    def settle(self, joins: Sequence[PiggybackJoin], *, as_one: bool) -> list[bool]:
        """Return which of a layer's joins have their result by now; those that were late have joined then.

        With ``as_one`` all or none have.
        """
        raise NotImplementedError


class LateResults(ResultCheck):
    """Tells it where all ranks run all layers; host events that it comes upon are held for the scheduler."""

    def __init__(self, tier: HostTier, held: HeldEvents, broadcast: RankBroadcast) -> None:
        self._tier, self._held, self._broadcast = tier, held, broadcast

    def settle(self, joins: Sequence[PiggybackJoin], *, as_one: bool) -> list[bool]:
        return self._broadcast.agree(lambda: self._came(joins, as_one))

    def _came(self, joins: Sequence[PiggybackJoin], as_one: bool) -> list[bool]:
        held = self._held
        held.events += self._tier.poll()
        done = {
            (event.slot, event.epoch, event.layer, event.position): event
            for event in held.events
            if isinstance(event, AttentionResult) and event.ok
        }
        results = [done.get((join.slot, join.epoch, join.layer, join.position)) for join in joins]
        came = [join.is_ready or result is not None for join, result in zip(joins, results, strict=True)]
        if as_one and not all(came):
            return [False] * len(joins)
        used = {id(result) for result in results if result is not None}
        held.events = [event for event in held.events if id(event) not in used]
        return came


class MissedJoins:
    """Copies to the host which of a step's joins did not join, as the device has found out.

    ``joined_LP`` is int64 on the device, for each of ``layers``: the row of each seat, -1 if it did not join. On a CPU
    nothing may write to it later.
    """

    def __init__(self, plan: StepPlan, layers: Iterable[int], joined_LP: Tensor) -> None:
        by_layer = joins_by_layer(plan)
        self._joins = [by_layer.get(layer, ()) for layer in layers]
        self._copy = AsyncHostCopy([joined_LP])

    def amend(self, output: StepOutput) -> StepOutput:
        """Wait for the copy, and return a step's output with the requests whose joins did not join.

        Raises:
            Stalled: The device did not finish the step in time.
        """
        return dataclasses.replace(output, missed=output.missed | self._result())

    def _result(self) -> frozenset[str]:
        """Wait for the copy, and return the requests whose joins did not join.

        Raises:
            Stalled: The device did not finish the step in time.
        """
        (joined_LP,) = self._copy.wait()
        missed: set[str] = set()
        for joins, rows in zip(self._joins, joined_LP.tolist(), strict=True):
            seat = 0
            for join in joins:
                if rows[seat] < 0:
                    missed.add(join.request_id)
                seat += join.num_rows  # drafts do as their token
        return frozenset(missed)


class LateJoins:
    """The strategy of steps with late joins."""

    def __init__(self, loop: LayerLoop, results: ResultCheck) -> None:
        self._loop, self._results = loop, results

    def hooks(self, plan: StepPlan) -> StepHooks | None:
        """Return the hooks of a step with late joins; None: it has none."""
        if all(join.is_ready for join in plan.joins):
            return None
        return LateStep(self._loop, self._results, plan)

    def forget(self, request_id: str) -> None:
        """Do nothing: nothing is kept."""


class LateStep(StepHooks):
    """Finds out at each layer which late joins of a step have their results, and empties the seats of the others."""

    fits_graphs = True

    def __init__(self, loop: LayerLoop, results: ResultCheck, plan: StepPlan) -> None:
        self._loop, self._results, self._as_one = loop, results, plan.joins_as_one
        by_layer = joins_by_layer(plan)
        self.unsettled = {n: joins for n, joins in by_layer.items() if not all([join.is_ready for join in joins])}
        """Joins of the layers with late ones, in the order of their seats, until it is settled which of them join."""
        self.found: dict[int, Tensor] = {}
        """Rows that joined at each layer with late joins, if the device looks for results: layer -> ``[P]`` int64 on
        the device; -1 in other seats."""

    def begin(self, run: StepRun) -> None:
        """Have the seats of each layer settled as the step comes to it."""
        run.joining = self._joining

    def _joining(self, run: StepRun, layer: int) -> SeatRows | None:
        """Settle the late joins of a layer, and return the seats into which results come; None if all stay empty."""
        joining = run.inputs.joining
        joins = self.unsettled.pop(layer, None)
        if joins is not None and layer in joining:
            if self._loop.rows.device_looks:
                joining[layer] = self._receive(run, layer, joining[layer], joins)
            else:
                self.empty_seats(run, layer, self._results.settle(joins, as_one=self._as_one), joins)
        return joining.get(layer)

    def _receive(self, run: StepRun, layer: int, seats: SeatRows, joins: Sequence[PiggybackJoin]) -> SeatRows:
        """Let the device find out which joins of a layer have their results, and return the seats of these."""
        joined_P = torch.empty_like(seats.rows_P)
        wanted = wanted_flags(joins)
        wanted += [0] * (run.inputs.num_seats - len(wanted))
        told = upload(torch.tensor([*wanted, self._as_one], dtype=torch.int64), joined_P.device)
        self._loop.rows.receive(seats.rows_P, told[:-1], told[-1:], joined_P)
        self.found[layer] = joined_P
        return SeatRows(rows_P=joined_P, slots_P=seats.slots_P, positions=seats.positions)

    def empty_seats(self, run: StepRun, layer: int, joined: Sequence[bool], joins: Sequence[PiggybackJoin]) -> None:
        """Empty the seats of a layer's joins that have not joined."""
        if all(joined):
            return
        joining = run.inputs.joining
        seats = joining.pop(layer)
        run.absent.update(join.request_id for join, here in zip(joins, joined, strict=True) if not here)
        if any(joined):
            is_here = [here for join, here in zip(joins, joined, strict=True) for _ in range(join.num_rows)]
            is_empty_P = torch.ones(run.inputs.num_seats, dtype=torch.bool)
            is_empty_P[: len(is_here)] = ~torch.tensor(is_here)
            joining[layer] = SeatRows(
                rows_P=seats.rows_P.masked_fill(upload(is_empty_P, seats.rows_P.device), -1),
                slots_P=seats.slots_P.masked_fill(is_empty_P, -1),
                positions=seats.positions,
            )

    def finish(self, run: StepRun, output: LayersOutput) -> LayersOutput:
        """Leave out the rows of joins that did not join, and name these."""
        if run.absent:
            sampled = self._loop.sampled(run)
            outcome = dataclasses.replace(output.outcome, missed=frozenset(run.absent))
            output = dataclasses.replace(output, sampled=sampled, outcome=outcome)
        if self.found:
            missed = MissedJoins(run.plan, self.found.keys(), torch.stack([*self.found.values()]))
            assert output.amend is None, "other hooks are to call what was there before them"
            output = dataclasses.replace(output, amend=missed.amend)
        return output

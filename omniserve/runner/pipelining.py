"""Asymmetric pipelining: the host tier attends for one sub-batch while the device runs the other one's layer.

Such a step is the only one that waits for the host tier, and its policies (``neo``, ``apex``) ask for it by name.
Results of other requests are kept for the next step.

Sources: NEO (Jiang et al., MLSys 2025); apex 2.3 and 3.2, figure 2. Legend: T rows, D hidden, N query heads,
K KV heads, H head size.

In each layer the device runs the second sub-batch's pre-attention and sends its q, k and v to the host tier, runs the
layer of the first sub-batch, waits for the host's results, and runs the second sub-batch's post-attention.

A hybrid first sub-batch has host rows, too. Behind its pre-attention their q, k and v go to the host tier; the device
attends for the device rows, and runs the second sub-batch's post-attention of the layer before and its pre-attention of
this one; then it waits for the first sub-batch's results. So the host always has one of them to attend for.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniserve.core.plan import PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.work import AttentionResult, HostEvent
from omniserve.host.tier import HostTier
from omniserve.layers.patched_model import BetweenHook, PatchedModel
from omniserve.runner.layer_loop import LayerLoop, StepHooks, StepRun
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.step_inputs import LayersOutput

_LOOK_AGAIN_S = 0.05  # a host tier whose threads are dead does not wake a waiting thread


class AwaitedResults:
    """Attention of one step's rows on the host tier, which the device waits for; both sub-batches share it.

    ``keep`` takes the host events of other requests that come while this waits.
    """

    def __init__(self, tier: HostTier, keep: Callable[[HostEvent], None], broadcast: RankBroadcast) -> None:
        self._tier, self._keep, self._broadcast = tier, keep, broadcast
        self.lost: frozenset[int] = frozenset()
        """Slots of rows whose attention has failed; they are submitted no more."""
        self._submitted: set[int] = set()  # slots whose task was not waited for
        self._waits_for: dict[int, int] = {}  # slot -> epoch of the tasks under way
        self._failed: set[int] = set()  # slots of those that failed

    def submit(
        self, layer: int, rows: Sequence[PiggybackEntry | PiggybackJoin], q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> None:
        """Hand rows to the host tier."""
        slots = torch.tensor([-1 if row.slot in self.lost else row.slot for row in rows])
        self._waits_for |= {row.slot: row.epoch for row in rows if row.slot not in self.lost}
        self._submitted |= {row.slot for row in rows} - self.lost
        self._tier.submit(layer, slots, *(tensor.cpu().contiguous() for tensor in (q_TNH, k_TKH, v_TKH)))

    def results(self, rows: Sequence[PiggybackEntry | PiggybackJoin], device: torch.device) -> Tensor:
        """Wait for the results of rows and return them, ``[T, N * H]``; that of a lost row is what its slot holds."""
        slots = [row.slot for row in rows]
        if not self._submitted.isdisjoint(slots):
            self._submitted -= set(slots)
            self.lost = self._broadcast.agree(lambda: self._wait(slots))
        return self._tier.results_SD[slots].to(device)

    def _wait(self, slots: Sequence[int]) -> frozenset[int]:
        """Wait for the tasks of slots; return the slots of all that have failed so far."""
        while any(slot in self._waits_for for slot in slots):
            is_alive = self._tier.healthy
            for event in self._tier.poll():
                if not isinstance(event, AttentionResult) or self._waits_for.get(event.slot) != event.epoch:
                    self._keep(event)
                    continue
                del self._waits_for[event.slot]
                if not event.ok:
                    self._failed.add(event.slot)
            if not any(slot in self._waits_for for slot in slots):
                break
            if not is_alive:
                self._failed |= self._waits_for.keys()
                self._waits_for = {}
                break
            self._tier.wait(_LOOK_AGAIN_S)
        return frozenset(self._failed)


class Pipelining:
    """The strategy of steps with rows that wait for the host tier in each layer (``StepPlan.pipelined``)."""

    def __init__(
        self, loop: LayerLoop, *, tier: HostTier, keep: Callable[[HostEvent], None], broadcast: RankBroadcast
    ) -> None:
        self._loop, self._tier, self._keep, self._broadcast = loop, tier, keep, broadcast

    def hooks(self, plan: StepPlan) -> StepHooks | None:
        """Return the hooks of a step with a second sub-batch, or a hybrid first one; None: it has neither."""
        if not plan.pipelined:
            return None
        awaited = AwaitedResults(self._tier, self._keep, self._broadcast)
        hybrid = plan.hybrid
        rows = tuple(row for row in plan.pipelined if row.request_id not in hybrid)
        second = (
            SecondBatch(
                rows,
                model=self._loop.model,
                awaited=awaited,
                residuals_SD=self._loop.rows.residuals_SD[
                    :: self._loop.rows.max_rows
                ],  # those of tokens, without drafts
                between=self._loop.states.of_decodes(rows),
            )
            if rows
            else None
        )
        if hybrid:
            return HybridBatch(hybrid_entries(plan), self._loop, awaited, second)
        assert second is not None
        return BesideSecond(second)

    def forget(self, request_id: str) -> None:
        """Do nothing: nothing is kept."""


class BesideSecond(StepHooks):
    """Runs a second sub-batch's pre-attention before each layer of the first one, and its post-attention behind it."""

    stops = True

    def __init__(self, second: SecondBatch) -> None:
        self._second = second

    def before_layer(self, run: StepRun, layer: int) -> None:
        """Run the second sub-batch up to its attention at the layer."""
        self._second.begin_layer(layer)

    def after_layer(self, run: StepRun, layer: int) -> None:
        """Run what is left of the layer for the second sub-batch."""
        self._second.end_layer(layer)

    def finish(self, run: StepRun, output: LayersOutput) -> LayersOutput:
        """Add the rows of the second sub-batch."""
        return self._second.add_to(output)


class HybridBatch(StepHooks):
    """The host rows of a hybrid first sub-batch (``StepPlan.hybrid``) share its dense halves, in seats.

    While the host attends for them, the device runs the second sub-batch, if there is one.
    """

    def __init__(
        self, rows: tuple[PiggybackEntry, ...], loop: LayerLoop, awaited: AwaitedResults, second: SecondBatch | None
    ) -> None:
        self._rows, self._loop, self._awaited, self._second = rows, loop, awaited, second

    def first_rows(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the host rows in seats."""
        return with_seats(plan, self._rows, self._loop.model.num_layers)

    def begin(self, run: StepRun) -> None:
        """Have the rows attend on both tiers."""
        run.attend = self._attend

    def _attend(
        self, run: StepRun, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> Tensor:
        n = run.inputs.num_device_rows
        self._awaited.submit(layer, self._rows, q_TNH[n:], k_TKH[n:], v_TKH[n:])
        attn_TD = self._loop.attend_device(run, layer, hidden_TD, q_TNH[:n], k_TKH[:n], v_TKH[:n])
        if self._second is not None:
            if layer:
                self._second.end_layer(layer - 1)
            self._second.begin_layer(layer)
        return torch.cat([attn_TD, self._awaited.results(self._rows, hidden_TD.device)])

    def finish(self, run: StepRun, output: LayersOutput) -> LayersOutput:
        """Leave out the rows whose attention has failed, and add those of the second sub-batch."""
        if self._second is not None:
            self._second.end_layer(self._loop.model.num_layers - 1)
        if lost := frozenset(row.request_id for row in self._rows if row.slot in self._awaited.lost):
            run.absent.update(lost)
            outcome = dataclasses.replace(output.outcome, lost=lost)
            output = dataclasses.replace(output, sampled=self._loop.sampled(run), outcome=outcome)
        return output if self._second is None else self._second.add_to(output)


def with_seats(plan: StepPlan, entries: tuple[PiggybackEntry, ...], num_layers: int) -> StepPlan:
    """Return a plan whose hybrid rows are in seats: each enters at layer 0, and is at the attention of every layer."""
    joins = tuple(
        PiggybackJoin(
            request_id=entry.request_id,
            position=entry.position,
            slot=entry.slot,
            epoch=entry.epoch,
            layer=layer,
            state_slot=entry.state_slot,
        )
        for layer in range(num_layers)
        for entry in entries
    )
    return dataclasses.replace(plan, entries=entries, joins=joins, num_piggyback_seats=len(entries))


def hybrid_entries(plan: StepPlan) -> tuple[PiggybackEntry, ...]:
    """Return the rows of a plan's hybrid requests.

    Raises:
        ValueError: The plan has other piggyback rows, or no device rows.
    """
    entries = [row for row in plan.pipelined if isinstance(row, PiggybackEntry) and row.is_hybrid]
    if plan.entries or plan.joins or plan.stops:
        raise ValueError(f"step {plan.step_id} has other rows beside its hybrid ones")
    if all(chunk.from_layer for chunk in plan.chunks):
        raise ValueError(f"step {plan.step_id} has hybrid rows, but no device rows from its first layer on")
    return tuple(entries)


class SecondBatch:
    """Passes the rows of ``StepPlan.pipelined``, entries and then joins by layer, through the layers of one step.

    ``begin_token`` was called for the entries; the joins left their residuals in ``residuals_SD``.
    """

    def __init__(
        self,
        rows: tuple[PiggybackEntry | PiggybackJoin, ...],
        *,
        model: PatchedModel,
        awaited: AwaitedResults,
        residuals_SD: Tensor,
        between: BetweenHook | None,
    ) -> None:
        self._rows, self._model, self._awaited = rows, model, awaited
        self._between = between
        # The last layer whose attention each row has; -1 for entries.
        self._layers = [row.layer if isinstance(row, PiggybackJoin) else -1 for row in rows]
        device = model.device
        positions = torch.tensor([row.position for row in rows], device=device)
        self._rotary = model.rotary(positions)
        slots = torch.tensor([row.slot for row in rows], device=device)
        self._hidden_TD = residuals_SD[slots]
        num_entries = bisect_right(self._layers, -1)
        if num_entries:
            entries = [row for row in rows[:num_entries] if isinstance(row, PiggybackEntry)]
            ids = torch.tensor([entry.token_id for entry in entries], device=device)
            lora_slots = torch.tensor([entry.lora_slot for entry in entries], device=device)
            embedded = model.embed(ids, positions[:num_entries], lora_slots)
            self._hidden_TD[:num_entries] = embedded

    def begin_layer(self, layer: int) -> None:
        """Run the pre-attention of the rows at this layer, and submit their attention to the host tier."""
        n = bisect_left(self._layers, layer)
        if n == 0:
            return
        self._pass_between(layer, n)
        cos, sin = (table[:n] for table in self._rotary) if self._rotary is not None else (None, None)
        q, k, v = self._model.pre_attention(layer, self._hidden_TD[:n], cos, sin)
        self._awaited.submit(layer, self._rows[:n], q, k, v)

    def end_layer(self, layer: int) -> None:
        """Wait for the host tier's results of this layer and run the post-attention."""
        n = bisect_right(self._layers, layer)
        if n == 0:
            return
        # A lost row goes on with whatever its slot holds: its token is not used.
        results_TD = self._awaited.results(self._rows[:n], self._hidden_TD.device)
        done_TD = self._model.post_attention(layer, results_TD, self._hidden_TD[:n])
        self._hidden_TD = torch.cat([done_TD, self._hidden_TD[n:]]) if n < len(self._rows) else done_TD
        if layer == self._model.num_layers - 1:
            self._pass_between(layer + 1, n)

    def _pass_between(self, layer: int, n: int) -> None:
        """Run the layers that do not attend before an attention layer on the first n rows."""
        if self._between is not None:
            self._hidden_TD = torch.cat([self._between(layer, self._hidden_TD[:n]), self._hidden_TD[n:]])

    def add_to(self, output: LayersOutput) -> LayersOutput:
        """Return the output of a step with the rows after the last layer, and the requests whose rows were lost."""
        slots_lost = self._awaited.lost
        kept = [i for i, row in enumerate(self._rows) if row.slot not in slots_lost]
        lost = frozenset(row.request_id for row in self._rows if row.slot in slots_lost)
        before_TD, sampled = output.hidden_TD, output.sampled
        rows = torch.arange(len(before_TD), len(before_TD) + len(kept), device=before_TD.device)
        sampled = dataclasses.replace(
            sampled,
            rows=torch.cat([sampled.rows, rows]),
            request_ids=(*sampled.request_ids, *(self._rows[i].request_id for i in kept)),
        )
        hidden_TD = torch.cat([before_TD, self._hidden_TD[kept]])
        outcome = dataclasses.replace(output.outcome, lost=output.outcome.lost | lost)
        return dataclasses.replace(output, hidden_TD=hidden_TD, sampled=sampled, outcome=outcome)

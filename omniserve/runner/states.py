"""StepStates: which rows of a step pass the layers without attention, and with the states of which requests.

A request's states advance when its rows pass, between two attentions. So those of a request whose token is away on the
host tier wait with it. Legend: T rows of a step, D hidden, n chunks of a group, L tokens of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Self

import torch
from torch import Tensor

from omniserve.core.plan import DeviceChunk, PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.layers.patched_model import BetweenHook, PatchedModel
from omniserve.layers.tracing.layer_states import RowGroup, StatePool
from omniserve.ops.streams import upload
from omniserve.runner.step_inputs import joins_by_layer

# (length, first chunk of its request) -> (first row, slot) of each such chunk
_Chunks = Mapping[tuple[int, bool], Sequence[tuple[int, int]]]


class StepStates:
    """Runs the layers between two attentions, and holds the states of all requests in ``num_slots`` slots."""

    def __init__(self, model: PatchedModel, *, num_slots: int) -> None:
        self._model = model
        self.pool = StatePool(model.family.state_forms, num_slots=num_slots, device=model.device)

    @classmethod
    def of(cls, model: PatchedModel, setup: RunnerSetup) -> Self:
        """Return the states of all requests that an engine can have, if the model has such."""
        return cls(model, num_slots=setup.num_state_slots)

    def of_plan(self, plan: StepPlan, missed: Set[str]) -> BetweenHook | None:
        """Return what runs the layers before each attention of a step; None: the model has no such layers.

        ``missed`` are the requests whose joins did not join, as far as that is known when a layer is run.
        """
        if not self._model.has_between:
            return None
        chunks = _by_length(plan.chunks)
        first_seat = plan.num_device_tokens
        joining = joins_by_layer(plan)
        alone = self._groups(chunks)

        def between(layer: int, hidden_TD: Tensor) -> Tensor:
            seats: Sequence[PiggybackEntry | PiggybackJoin] = joining.get(layer - 1, ()) if layer else plan.entries
            rows = {
                seat: each.state_slot for seat, each in enumerate(seats, first_seat) if each.request_id not in missed
            }
            groups = self._groups(_with_decodes(chunks, rows)) if rows else alone
            return self._model.run_between(layer, hidden_TD, groups, self.pool)

        return between

    def of_decodes(self, rows: Sequence[PiggybackEntry | PiggybackJoin]) -> BetweenHook | None:
        """Return the same for a batch of decodes, of which the first ones are there."""
        if not self._model.has_between:
            return None

        def between(layer: int, hidden_TD: Tensor) -> Tensor:
            slots = dict(enumerate(row.state_slot for row in rows[: len(hidden_TD)]))
            groups = self._groups(_with_decodes({}, slots))
            return self._model.run_between(layer, hidden_TD, groups, self.pool)

        return between

    def _groups(self, chunks: _Chunks) -> list[RowGroup]:
        to_device = partial(upload, device=self._model.device)
        groups = []
        for (length, is_fresh), members in chunks.items():
            firsts, slots = torch.tensor(members, dtype=torch.int64).unbind(1)
            rows_nL = firsts[:, None] + torch.arange(length)
            groups.append(RowGroup(to_device(rows_nL), to_device(slots.contiguous()), is_fresh))
        return groups


def _by_length(chunks: Iterable[DeviceChunk]) -> _Chunks:
    found: defaultdict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    row = 0
    for chunk in chunks:
        found[len(chunk.token_ids), chunk.start == 0].append((row, chunk.state_slot))
        row += len(chunk.token_ids)
    return found


def _with_decodes(chunks: _Chunks, slots: Mapping[int, int]) -> _Chunks:
    """Return the chunks with more of one token each: row -> state slot."""
    return {**chunks, (1, False): [*chunks.get((1, False), ()), *slots.items()]}

"""SecondBatch: asymmetric pipelining. The host tier attends for it while the device runs the first sub-batch's layer.

Sources: NEO (Jiang et al., MLSys 2025); apex 2.3 and 3.2, figure 2. Legend: T rows, D hidden, H head size.

In each layer the device runs the second sub-batch's pre-attention and sends its q, k and v to the host tier, runs the
layer of the first sub-batch, waits for the host's results, and runs the second sub-batch's post-attention. Unlike in
NEO, the first sub-batch has no host rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import torch
from torch import Tensor

from omniserve.core.plan import HostEvent, HostEventKind, PiggybackEntry, PiggybackJoin
from omniserve.host.tier import HostTier
from omniserve.layers.patching import BetweenHook, PatchedModel

_LOOK_AGAIN_S = 0.05  # a host tier whose threads are dead does not wake a waiting thread


class SecondBatch:
    """Passes the rows of ``StepPlan.pipelined``, entries and then joins by layer, through the layers of one step.

    ``begin_token`` was called for the entries; the joins left their residuals in ``residuals_SD``. ``keep`` takes the
    host events of other requests that come while this waits.
    """

    def __init__(
        self, rows: tuple[PiggybackEntry | PiggybackJoin, ...], *, model: PatchedModel, tier: HostTier,
        residuals_SD: Tensor, between: BetweenHook | None, keep: Callable[[HostEvent], None],
    ) -> None:  # fmt: skip
        self._rows, self._model, self._tier, self._keep = rows, model, tier, keep
        self._between = between
        # The last layer whose attention each row has; -1 for entries.
        self._layers = [row.layer if isinstance(row, PiggybackJoin) else -1 for row in rows]
        self._slots = [row.slot for row in rows]
        self._lost: set[int] = set()
        self._waits_for: dict[int, int] = {}  # slot -> epoch of the tasks under way
        device = model.device
        positions = torch.tensor([row.position for row in rows], device=device)
        self._rotary = model.rotary(positions)
        slots = torch.tensor(self._slots, device=device)
        self._hidden_TD = residuals_SD[slots]
        num_entries = bisect_right(self._layers, -1)
        if num_entries:
            ids = [row.token_id for row in rows[:num_entries] if isinstance(row, PiggybackEntry)]
            embedded = model.embed(torch.tensor(ids, device=device), positions[:num_entries])
            self._hidden_TD[:num_entries] = embedded

    def begin_layer(self, layer: int) -> None:
        """Run the pre-attention of the rows at this layer, and submit their attention to the host tier."""
        n = bisect_left(self._layers, layer)
        if n == 0:
            return
        self._pass_between(layer, n)
        cos, sin = (table[:n] for table in self._rotary) if self._rotary is not None else (None, None)
        q, k, v = self._model.pre_attention(layer, self._hidden_TD[:n], cos, sin)
        slots = [-1 if slot in self._lost else slot for slot in self._slots[:n]]
        self._waits_for = {row.slot: row.epoch for row in self._rows[:n] if row.slot not in self._lost}
        rows = (tensor.cpu().contiguous() for tensor in (q, k, v))
        self._tier.submit(layer, torch.tensor(slots), *rows)

    def end_layer(self, layer: int) -> None:
        """Wait for the host tier's results of this layer and run the post-attention."""
        self._wait()
        n = bisect_right(self._layers, layer)
        if n == 0:
            return
        # A lost row goes on with whatever its slot holds: its token is not used.
        results_TD = self._tier.results_SD[self._slots[:n]].to(self._hidden_TD.device)
        done_TD = self._model.post_attention(layer, results_TD, self._hidden_TD[:n])
        self._hidden_TD = torch.cat([done_TD, self._hidden_TD[n:]]) if n < len(self._rows) else done_TD
        if layer == self._model.num_layers - 1:
            self._pass_between(layer + 1, n)

    def _pass_between(self, layer: int, n: int) -> None:
        """Run the layers that do not attend before an attention layer on the first n rows."""
        if self._between is not None:
            self._hidden_TD = torch.cat([self._between(layer, self._hidden_TD[:n]), self._hidden_TD[n:]])

    def result(self) -> tuple[Tensor, list[str], frozenset[str]]:
        """Return the hidden states after the last layer, their requests, and the requests whose row was lost."""
        kept = [i for i, slot in enumerate(self._slots) if slot not in self._lost]
        lost = frozenset(row.request_id for row in self._rows if row.slot in self._lost)
        return self._hidden_TD[kept], [self._rows[i].request_id for i in kept], lost

    def _wait(self) -> None:
        while self._waits_for:
            is_alive = self._tier.healthy
            for event in self._tier.poll():
                if self._waits_for.get(event.slot) != event.epoch:
                    self._keep(event)
                    continue
                del self._waits_for[event.slot]
                if event.kind is not HostEventKind.ATTENTION_DONE:
                    self._lost.add(event.slot)
            if not self._waits_for:
                return
            if not is_alive:
                self._lost |= self._waits_for.keys()
                self._waits_for = {}
                return
            self._tier.wait(_LOOK_AGAIN_S)

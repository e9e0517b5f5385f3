"""PendingTokens: what a step sampled goes into the next one on the device, before the host knows it.

Legend: T rows of a step, R rows that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omniserve.core.plan import PENDING_TOKEN, StepPlan
from omniserve.ops.device_copies import upload


class PendingTokens:
    """The tokens of the step that was launched last, by request. Whatever is pending in a plan is one of them.

    Args:
        device: Where the tokens are, and the rows to fill.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._request_ids: Sequence[str] = ()
        self._tokens_R = torch.empty(0, dtype=torch.int64, device=device)

    def note(self, request_ids: Sequence[str], tokens_R: Tensor) -> None:
        """Take what a step sampled, in place of what the one before did.

        Args:
            request_ids: The request of each token.
            tokens_R: int64, on the device.
        """
        self._request_ids, self._tokens_R = request_ids, tokens_R

    def fill(self, token_ids_T: Tensor, plan: StepPlan, *, first_seat: int | None = None) -> None:
        """Put the tokens into the rows of a plan that wait for them, if any do; the host waits for nothing.

        To be called before the rows are embedded, or a captured graph that does so is replayed.

        Args:
            token_ids_T: ``[T]`` int64, on the device: the rows of the plan's chunks, then its seats; it is changed.
            plan: The step; none of its ``pipelined`` rows may be pending.
            first_seat: Row of the first seat; None: the one behind the chunks.

        Raises:
            RuntimeError: The last step did not sample what the plan waits for.
        """
        rows: list[int] = []
        wanted: list[str] = []
        end = 0
        for chunk in plan.chunks:
            end += len(chunk.token_ids)
            if chunk.token_ids[-1] == PENDING_TOKEN:
                rows.append(end - 1)
                wanted.append(chunk.request_id)
        for row, entry in enumerate(plan.entries, end if first_seat is None else first_seat):
            if entry.token_id == PENDING_TOKEN:
                rows.append(row)
                wanted.append(entry.request_id)
        if not rows:
            return
        index = {request_id: i for i, request_id in enumerate(self._request_ids)}
        if missing := [request_id for request_id in wanted if request_id not in index]:
            raise RuntimeError(f"step {plan.step_id} waits for tokens of {missing}, which the last step did not sample")
        sources = [index[request_id] for request_id in wanted]
        rows_W, sources_W = upload(torch.tensor([rows, sources]), self._device).unbind(0)
        token_ids_T.index_copy_(0, rows_W, self._tokens_R.index_select(0, sources_W))

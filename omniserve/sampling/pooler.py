"""Pooler: embeddings of prompts, from the hidden states of their rows, whatever chunks these come in.

A row is pooled in the step that computes it: its last token's hidden state is the embedding, or the rows of each chunk
are added to a sum, which stays on the device. The last chunk's sum, divided by the number of rows, goes to the host,
as tokens do: the host launches it and waits only in ``PendingEmbeddings.result``.

Legend: T rows of a step, R rows that are pooled, E requests whose last row is among them, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omniserve.ops.streams import AsyncHostCopy, upload

# The most rows whose hidden states behind the norm are held at a time, in float32: 64 MB with 4096 columns.
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, slots=True)
class PendingEmbeddings:
    """The embeddings that a step has completed, which are being copied to the host."""

    request_ids: Sequence[str]
    copy: AsyncHostCopy
    """One tensor, ``[E, D]`` float32."""

    def result(self) -> tuple[dict[str, tuple[float, ...]], dict[str, str]]:
        """Wait for the embeddings; return them, and error messages for those that are not finite, by request."""
        (vectors_ED,) = self.copy.wait()
        embeddings: dict[str, tuple[float, ...]] = {}
        failed: dict[str, str] = {}
        for request_id, vector in zip(self.request_ids, vectors_ED.tolist(), strict=True):
            if math.isfinite(sum(vector)):
                embeddings[request_id] = tuple(vector)
            else:
                failed[request_id] = "the model returned non-finite hidden states"
        return embeddings, failed


class Pooler:
    """Holds the sums of means between the steps of a request.

    Args:
        last_hidden: Turns rows ``[R, D]`` of the last layer's output into the model's last hidden states.
    """

    def __init__(self, last_hidden: Callable[[Tensor], Tensor]) -> None:
        self._last_hidden = last_hidden
        self._sums: dict[str, Tensor] = {}
        """By request: the sum over its rows so far, float32 ``[D]``."""

    def launch(self, hidden_TD: Tensor, pooled: Sequence[tuple[str, range, int | None]]) -> PendingEmbeddings | None:
        """Pool rows of a step; the host waits for nothing.

        Args:
            hidden_TD: The step's rows after the last layer.
            pooled: For each chunk its request, its rows that are pooled, and how many rows of the request are in all,
                if these are the last; else None.

        Returns:
            The embeddings that are complete; None if none is.
        """
        request_ids: list[str] = []
        vectors: list[Tensor] = []
        sums_D = self._sums_of_rows(hidden_TD, [rows for _, rows, _ in pooled])
        for (request_id, _, total), sum_D in zip(pooled, sums_D, strict=True):
            if (before_D := self._sums.pop(request_id, None)) is not None:
                sum_D = before_D + sum_D
            if total is None:
                self._sums[request_id] = sum_D
            else:
                request_ids.append(request_id)
                vectors.append(sum_D / total)
        return PendingEmbeddings(request_ids, AsyncHostCopy([torch.stack(vectors)])) if request_ids else None

    def remove(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._sums.pop(request_id, None)

    def _sums_of_rows(self, hidden_TD: Tensor, groups: Sequence[range]) -> list[Tensor]:
        """Return the sum of the hidden states of each group of rows, float32 ``[D]``."""
        if all(len(rows) == 1 for rows in groups):
            rows_R = upload(torch.tensor([rows.start for rows in groups]), hidden_TD.device)
            return list(self._last_hidden(hidden_TD[rows_R]).float().unbind(0))
        return [self._sum(hidden_TD[rows.start : rows.stop]) for rows in groups]

    def _sum(self, hidden_RD: Tensor) -> Tensor:
        pieces = hidden_RD.split(_ROWS_AT_A_TIME)
        return torch.stack([self._last_hidden(piece).float().sum(0) for piece in pieces]).sum(0)

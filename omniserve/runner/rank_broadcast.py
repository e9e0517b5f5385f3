"""RankBroadcast: hands the decisions and the sampled tokens of rank 0 to the other ranks of one model.

The ranks run the same plan with the same code, so they take the same way through a step unless something outside of the
plan decides it: which host results have come, which rows must leave, whether there is time to capture another graph.
Rank 0 decides that, and the others are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class RankBroadcast:
    """The broadcast of an unsharded model, which has no other ranks: ``agree`` decides, and ``share`` does nothing."""

    def agree(self, decide: Callable[[], T]) -> T:
        """Return what rank 0 decides. All ranks call this in the same order; ``decide`` runs on rank 0 alone."""
        return decide()

    def share(self, tokens_R: Tensor) -> None:
        """Overwrite the sampled tokens ``[R]`` int64 of a step, on the device, by those of rank 0."""

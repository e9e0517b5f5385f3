"""mark_preemptible: the rows of a step that may be asked to leave it between two layers (conserve 4.3, omniserve 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from omniserve.sched.batch import Batch


def mark_preemptible(batch: Batch, request_ids: Set[str]) -> None:
    """Mark the chunks of these requests that are in a batch; it is to be closed with its ``plan`` next."""
    for chunk in batch.chunks:
        if chunk.request_id in request_ids:
            batch.replace(dataclasses.replace(chunk, is_preemptible=True))

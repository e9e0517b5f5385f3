"""SharedBlocks: an LS and a BE request share a device block, in which the BE request's tokens run from the right.

Paper: bros 5.1. The KV manager ``bidirectional`` has the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniserve.core.work import SideWork
from omniserve.sched.features.base import FeatureContext, StepFeature
from omniserve.sched.state import RequestState


class SharedBlocks(StepFeature):
    """Tells the KV manager the kinds of requests, and plans which way their blocks are read."""

    def __init__(self, context: FeatureContext) -> None:
        assert context.kv.sharing is not None
        self._sharing = context.kv.sharing

    def on_arrival(self, state: RequestState) -> None:
        self._sharing.declare(state.request_id, state.kind)

    def chunk_fields(self, state: RequestState) -> Mapping[str, Any]:
        return {"is_reversed": self._sharing.runs_from_right(state.request_id)}

    def take_work(self) -> tuple[SideWork, ...]:
        return self._sharing.take_relocations()  # first of all: other copies may read what these have written

"""HaltedChunks: chunks that left a step between two layers go on in a later step, before the layer where they left.

Paper: conserve 4.3, omniserve 6. The runner keeps their hidden states (``runner/safepoint.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omniserve.core.plan import DeviceChunk, StepOutput, StepPlan
from omniserve.sched.features.base import FeatureContext, Row, StepFeature
from omniserve.sched.state import Phase, RequestState
from omniserve.sched.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class HaltedChunk:
    """Tokens that left a step between two layers; their hidden states wait on the device."""

    layer: int
    """The next one to compute."""
    start: int
    num_tokens: int


def halted_chunk(state: RequestState) -> HaltedChunk | None:
    """Return the chunk of a request that has left a step; None: there is none."""
    found = state.facts.get(HaltedChunk)
    assert found is None or isinstance(found, HaltedChunk)
    return found


class HaltedChunks(StepFeature):
    """Has each chunk that left a step go on as it is."""

    def __init__(self, context: FeatureContext) -> None:
        self._counters: Counter[str] = context.counters
        self._preemptible_kind = context.settings.options.preemptible_kind

    def on_phase(self, state: RequestState, phase: Phase) -> None:
        state.facts.pop(HaltedChunk, None)

    def chunk_size(self, state: RequestState, tokens_left: int, cost: StepCost | None, bound_s: float) -> int | None:
        """Return the size of the request's chunk; one that does not fit is forgotten, and the request begins anew."""
        halted = halted_chunk(state) if state.facts else None
        if halted is None:
            return None
        fits = halted.num_tokens <= tokens_left
        if fits and cost is not None and bound_s < math.inf:
            samples = state.num_logits(halted.start, halted.num_tokens)
            fits = cost.seconds_with(halted.start, halted.num_tokens, samples=samples) <= bound_s
        if fits:
            return halted.num_tokens
        del state.facts[HaltedChunk]
        return None

    def chunk_fields(self, state: RequestState) -> Mapping[str, Any]:
        halted = halted_chunk(state) if state.facts else None
        from_layer = 0 if halted is None else halted.layer
        return {"from_layer": from_layer, "is_preemptible": state.kind is self._preemptible_kind}

    def is_certain(self, plan: StepPlan) -> bool:
        return not (plan.stops or any(chunk.from_layer for chunk in plan.chunks))

    def takes_outcome(self, state: RequestState, row: Row, output: StepOutput) -> bool:
        """Book a chunk that left the step."""
        if not (state.facts or output.halted) or not isinstance(row, DeviceChunk):
            return False
        state.facts.pop(HaltedChunk, None)
        layer = output.halted.get(row.request_id)
        if layer is None:
            return False
        self._counters["layer_preemptions"] += 1
        if layer > 0:
            state.facts[HaltedChunk] = HaltedChunk(layer, row.start, len(row.token_ids))
        return True

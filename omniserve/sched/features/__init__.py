"""Features: parts of steps that only some requests or engines have, in planning and in booking.

Each feature is a file of its own, and is imported only if an engine has it: drafts (``drafts.py``), chunks that
left a step between two layers (``halted_chunks.py``), slots of recurrent states (``state_slots.py``), blocks that two
requests share (``shared_blocks.py``). The table of requests, the batch and the scheduler call the hooks of
``StepFeature`` (``base.py``), and know no feature by name. To add one, subclass it and add an entry to
``STEP_FEATURES``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from omniserve.core.request import Request
from omniserve.sched.features.base import FeatureContext, StepFeature
from omniserve.sched.state import Phase, RequestState


@dataclass(frozen=True, slots=True)
class StepFeatureEntry:
    """A kind of feature."""

    load: Callable[[], type[StepFeature]]
    """Imports its class."""
    is_wanted: Callable[[FeatureContext], bool]
    """Tells whether an engine has such a feature from its start."""
    is_wanted_by: Callable[[FeatureContext, Request], bool] = lambda context, request: False
    """Tells whether the engine has it from this request on."""


def _state_slots() -> type[StepFeature]:
    from omniserve.sched.features.state_slots import StateSlots

    return StateSlots


def _shared_blocks() -> type[StepFeature]:
    from omniserve.sched.features.shared_blocks import SharedBlocks

    return SharedBlocks


def _halted_chunks() -> type[StepFeature]:
    from omniserve.sched.features.halted_chunks import HaltedChunks

    return HaltedChunks


def _drafts() -> type[StepFeature]:
    from omniserve.sched.features.drafts import Drafts

    return Drafts


STEP_FEATURES = [
    StepFeatureEntry(_state_slots, lambda context: context.limits.num_state_slots > 0),
    StepFeatureEntry(_shared_blocks, lambda context: context.kv.sharing is not None),
    StepFeatureEntry(_halted_chunks, lambda context: context.settings.options.preempts),
    StepFeatureEntry(_drafts, lambda context: False, lambda context, request: context.limits.is_speculative(request)),
]
"""All kinds of features, in the order in which their hooks are called."""


class StepFeatures:
    """The features that an engine has by now, in the order of ``STEP_FEATURES``."""

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self._numbers = [number for number, entry in enumerate(STEP_FEATURES) if entry.is_wanted(context)]
        self.on = [STEP_FEATURES[number].load()(context) for number in self._numbers]
        """The features themselves."""
        self._others = {n: entry for n, entry in enumerate(STEP_FEATURES) if n not in self._numbers}

    def on_arrival(self, state: RequestState) -> None:
        """Take note of a new request, with which the engine may come to have a feature."""
        for number, entry in [*self._others.items()]:
            if entry.is_wanted_by(self._context, state.request):
                del self._others[number]
                place = bisect.bisect(self._numbers, number)
                self._numbers.insert(place, number)
                self.on.insert(place, entry.load()(self._context))
        for feature in self.on:
            feature.on_arrival(state)

    def on_phase(self, state: RequestState, phase: Phase) -> None:
        """Take note that a request comes to another phase."""
        for feature in self.on:
            feature.on_phase(state, phase)

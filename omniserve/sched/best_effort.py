"""BestEffortWork: the BE decodes and prompts of a step on the device, up to a bound (omniserve 3.3.4, 3.3.5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, Self

from omniserve.core.plan import Bound, LeftOut
from omniserve.sched.batch import Batch
from omniserve.sched.options import CoServingOptions
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import Forecast, TimeBound, largest, left_out
from omniserve.sched.tier_moves import TierMoves
from omniserve.sched.view import RequestView

if TYPE_CHECKING:
    from omniserve.sched.deadlines import Deadlines
    from omniserve.sched.long_waits import LongWaits

MIN_BE_CHUNK = 16
"""Tokens of BE work that a step without other device work has at least, whatever the bound: an idle machine works."""

_RATE = 1 / 32
"""Weight of each new request in the means."""


class BestEffortMix:
    """How long prompts and outputs of BE requests are lately, so that work on both can be compared.

    It learns from BE requests that end; until one has, from what requests want at most as they arrive.
    """

    def __init__(self) -> None:
        self._prompt_tokens = self._output_tokens = 0.0
        self._has_ended = False

    @property
    def prompt_token_value(self) -> float:
        """The output tokens that a BE prompt token stands for: E[output] / E[prompt]; 1 before the first request.

        A prompt brings nothing by itself, but the outputs that it makes possible: 0.015 for a prompt of 9,000 tokens
        with an output of 136, 1 where both are equally long.
        """
        return self._output_tokens / self._prompt_tokens if self._prompt_tokens else 1.0

    def note_arrival(self, state: RequestState) -> None:
        """Take note of a BE request that has come."""
        if not self._has_ended:
            self._learn(state.num_prompt_tokens, state.request.sampling.max_tokens)

    def note_end(self, state: RequestState) -> None:
        """Take note of a BE request that has ended, with the tokens that it got."""
        if not self._has_ended:
            self._prompt_tokens, self._has_ended = 0.0, True
        self._learn(state.num_prompt_tokens, state.num_output_tokens)

    def _learn(self, prompt_tokens: int, output_tokens: int) -> None:
        rate = _RATE if self._prompt_tokens else 1.0
        self._prompt_tokens += rate * (prompt_tokens - self._prompt_tokens)
        self._output_tokens += rate * (output_tokens - self._output_tokens)


class OffloadForTime(Protocol):
    """Offloads decodes that the bound keeps out of this step: all of them, some or none."""

    def __call__(self, batch: Batch, kept_out: Sequence[RequestState]) -> None: ...


class BestEffortWork:
    """Fills a step with BE work. What finds no memory moves to the host tier.

    Args:
        offload_for_time: Is asked in each step, also if no decode is kept out; None: nothing is offloaded for time.
        order: As ``be_order`` of ``CoServingOptions``.
        by_prefix: As ``be_prefix_order`` there.
        max_wait_s: As ``be_max_wait_s`` there.
    """

    def __init__(
        self,
        view: RequestView,
        moves: TierMoves,
        offload_for_time: OffloadForTime | None,
        *,
        order: Literal["decode", "prefill"],
        by_prefix: bool,
        max_wait_s: float | None = None,
    ) -> None:
        self._view, self._memory = view, view.memory
        self.moves = moves
        self._offload_for_time = offload_for_time
        self._order, self._by_prefix = order, by_prefix
        self._mix = BestEffortMix()
        self._waits: LongWaits | None = None
        if max_wait_s is not None:
            from omniserve.sched.long_waits import LongWaits

            self._waits = LongWaits(view, max_wait_s)
        self._without_memory: RequestState | None = None
        """The BE prompt for which the last step had time, but no memory."""

    @classmethod
    def of(cls, view: RequestView, options: CoServingOptions, forecast: Forecast | None) -> Self:
        """Return the BE work that these options ask for."""
        moves = TierMoves(view, options, forecast)
        offload_for_time = moves.offload_for_time if options.offload_for_time else None
        return cls(
            view,
            moves,
            offload_for_time,
            order=options.be_order,
            by_prefix=options.be_prefix_order,
            max_wait_s=options.be_max_wait_s,
        )

    # -- what requests bring -------------------------------------------------------------------------------------

    def note_arrival(self, state: RequestState) -> None:
        """Take note of a BE request that has come."""
        self._mix.note_arrival(state)

    def note_end(self, state: RequestState) -> None:
        """Take note of a BE request that has ended."""
        self._mix.note_end(state)

    def value_of(self, batch: Batch) -> float:
        """Return the BE work of a step's chunks in output tokens: a decode is one, a prompt token its value."""
        states = self._view.states
        chunks = [chunk for chunk in batch.chunks if states[chunk.request_id].kind is BE]
        decodes = sum(states[chunk.request_id].decodes for chunk in chunks)
        prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks if not states[chunk.request_id].decodes)
        return decodes + self._mix.prompt_token_value * prompt_tokens

    # -- a step --------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, bound_s: float) -> tuple[LeftOut, ...]:
        """Schedule BE work on the device in its order; return what to note of work that is kept out."""
        if not (self._view.device[BE] or self._view.waiting[BE]):
            self._without_memory = None
            if self._offload_for_time is not None:
                self._offload_for_time(batch, ())
            return ()
        if self._waits is not None:
            self._serve_late(batch, bound_s, self._waits)
        if self._order == "decode":
            self._make_room(batch, self._without_memory)
            kept_out = self._decode(batch, bound_s)
            kept_out_prefill, self._without_memory = self._prefill(batch, bound_s)
            return kept_out + kept_out_prefill
        kept_out, without_memory = self._prefill(batch, bound_s)
        self._make_room(batch, without_memory)
        return kept_out + self._decode(batch, bound_s)

    def run_first(self, batch: Batch, bound: TimeBound, deadlines: Deadlines) -> TimeBound:
        """Schedule the requests whose deadline is at stake, by deadline; return the bound of all other BE work."""
        assert batch.cost is not None
        urgent, spare_s = deadlines.first_and_spare_s(batch.now_s)
        states = [state for state in urgent if state not in self._view.hidden]
        decodes = [state for state in states if state.phase is Phase.DEVICE and state.decodes]
        for state in decodes[: _num_within(batch, decodes, bound.seconds)]:
            if state.phase is Phase.DEVICE:
                self.moves.run_or_offload(batch, state, at_stake=True)
        for state in states:
            if state in batch or state in decodes or state.phase not in (Phase.DEVICE, Phase.WAITING):
                continue
            if state.phase is Phase.WAITING and self._view.waiting[LS]:
                break  # as in _prefill
            if self._prefill_first(batch, state, bound.seconds) is not None:
                break
            if state.phase is not Phase.MOVING and not batch.samples(state):
                break
        if batch.is_empty:
            return bound  # nothing runs that other work could hold up
        return bound.or_tighter(batch.cost.seconds() + spare_s, "deadlines of best-effort requests")

    def _prefill_first(self, batch: Batch, state: RequestState, bound_s: float) -> Bound | None:
        """Schedule a prompt with a deadline; for its memory and its place BE requests behind it give way."""
        while True:
            least = _min_tokens(batch)
            if state.phase is Phase.DEVICE:
                return batch.add(state, bound_s=bound_s, min_tokens=least)
            reserve = self._memory.reserve_for_ls(state)
            refused_by = batch.admit(state, bound_s=bound_s, min_tokens=least, reserve_blocks=reserve)
            if refused_by not in (Bound.MEMORY, Bound.REQUESTS):
                return refused_by
            victim = batch.youngest_victim(state, (BE,), at_stake=True)
            if victim is None or victim in self._view.pinned:
                return refused_by
            batch.preempt(victim)

    def _serve_late(self, batch: Batch, bound_s: float, waits: LongWaits) -> None:
        """Schedule requests that have waited for too long before all other BE work, and at its expense."""
        for state in waits.late(batch.now_s):
            if state in batch:
                continue  # for its deadline
            if state.phase is Phase.WAITING and self._view.waiting[LS]:
                continue  # a BE prompt must not take the memory that an LS one waits for
            refused_by = self._add_late(batch, state, bound_s)
            if refused_by in (Bound.MEMORY, Bound.REQUESTS) and waits.make_room(batch, state):
                refused_by = self._add_late(batch, state, bound_s)
            if refused_by in (Bound.TIME, Bound.TOKENS):
                return

    def _add_late(self, batch: Batch, state: RequestState, bound_s: float) -> Bound | None:
        add = batch.add if state.phase is Phase.DEVICE else batch.admit
        reserve = self._memory.reserve_for_ls(state)
        return add(state, bound_s=bound_s, min_tokens=_min_tokens(batch), reserve_blocks=reserve)

    def _prefill(self, batch: Batch, bound_s: float) -> tuple[tuple[LeftOut, ...], RequestState | None]:
        """Schedule BE prefill up to the bound; a prompt that is cut short ends it: no crumbs follow.

        Returns:
            What to note of prompts that are kept out, and the first of them if memory is what it lacks.
        """
        waiting = self._view.waiting
        admitted = [state for state in self._view.device[BE] if not state.decodes and state not in batch]
        for number, state in enumerate(admitted):
            refused_by = batch.add(state, bound_s=bound_s, min_tokens=_min_tokens(batch))
            if refused_by is not None:  # not for memory: it holds all its blocks since its first chunk
                return left_out("BE prefill", len(admitted) - number, refused_by, state.request_id), None
            if not batch.samples(state):
                return (), None
        if waiting[LS]:
            return (), None  # a BE prompt must not take the memory that an LS one waits for
        for state in self._view.waiting_by_prefix() if self._by_prefix else waiting[BE]:
            reserve = self._memory.reserve_for_ls(state)
            refused_by = batch.admit(state, bound_s=bound_s, min_tokens=_min_tokens(batch), reserve_blocks=reserve)
            if refused_by is not None:
                kept_out = left_out("BE prefill", len(waiting[BE]), refused_by, state.request_id)
                return kept_out, state if refused_by is Bound.MEMORY else None
            if state.phase is not Phase.MOVING and not batch.samples(state):
                break  # what is copied back takes nothing of the step
        return (), None

    def _make_room(self, batch: Batch, state: RequestState | None) -> None:
        if state is not None and state.phase is Phase.WAITING and not self._view.waiting[LS]:
            self.moves.make_room_for_be(batch, state)

    def _decode(self, batch: Batch, bound_s: float) -> tuple[LeftOut, ...]:
        """Schedule BE decodes up to the bound, oldest first; a decode that finds no memory moves to the host tier."""
        decodes = [state for state in self._view.device[BE] if state.decodes and state not in batch]
        within = _num_within(batch, decodes, bound_s)
        kept_out: tuple[LeftOut, ...] = ()
        out_of_time: list[RequestState] = []
        for number, state in enumerate(decodes):
            if batch.tokens_left == 0 or number >= within:
                bound = Bound.TOKENS if batch.tokens_left == 0 else Bound.TIME
                rest = [s for s in decodes[number:] if s.phase is Phase.DEVICE and s not in batch]
                kept_out += left_out("BE decode", len(rest), bound, rest[0].request_id if rest else "")
                out_of_time = rest if bound is Bound.TIME else []
                break
            if state.phase is not Phase.DEVICE:
                continue
            refused_by = self.moves.run_or_offload(batch, state)
            if refused_by is not None and state.phase is Phase.DEVICE:
                kept_out += left_out("BE decode", 1, refused_by, state.request_id)
        if self._offload_for_time is not None:
            self._offload_for_time(batch, out_of_time)
        return kept_out


def _min_tokens(batch: Batch) -> int:
    return MIN_BE_CHUNK if batch.is_empty else 0


def _num_within(batch: Batch, decodes: Sequence[RequestState], bound_s: float) -> int:
    """Return how many decodes, from the first on, the bound lets in (3.3.5); one at least if nothing else runs."""
    most = min(len(decodes), batch.tokens_left)
    if batch.cost is None or bound_s == math.inf or most == 0:
        return len(decodes)
    cost, shape = batch.cost, batch.cost.shape
    contexts = list(itertools.accumulate(state.num_computed_tokens for state in decodes[:most]))
    keys = list(itertools.accumulate(shape.keys_seen(state.num_computed_tokens, 1) for state in decodes[:most]))

    def seconds(count: int) -> float:
        last = count - 1
        return cost.seconds_after(lambda step: step.add_decodes(count, contexts[last], keys[last], samples=count))

    within = largest(seconds, most, bound_s)
    return max(within, 1 if batch.is_empty else 0)

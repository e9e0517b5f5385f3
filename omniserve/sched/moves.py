"""RequestMoves: requests on their way between the tiers, and back to the device from what was kept of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from omniserve.core.request import ServiceClass
from omniserve.core.work import Done, KVMove, MoveDirection
from omniserve.kv.base import KVManager, MoveResult, Tier
from omniserve.sched.features import StepFeatures
from omniserve.sched.prefixes_on_host import PrefixesOnHost
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.residents import HostResidents
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.sources.kept import KeptKV
from omniserve.sched.state import LS, Phase, RequestState


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveContext:
    """What ``RequestMoves`` works with."""

    kv: KVManager
    prefixes: PrefixesOnHost
    kept: KeptKV
    residents: HostResidents
    side_work: SideWorkQueue
    features: StepFeatures
    waiting: Mapping[ServiceClass, RequestQueue]
    device: Mapping[ServiceClass, RequestQueue]
    counters: Counter[str]
    """Fields of ``SchedulerStats`` that are not by class."""
    offloads: bool
    """Requests may move between the tiers."""
    offloads_ls: bool
    """LS requests may, too."""
    keep_checkpoint: bool
    """A request that comes to the device keeps its full host blocks as its checkpoint."""
    wait: Callable[[RequestState], None]
    """Puts a request without a table into its queue."""
    on_host: Callable[[RequestState], None]
    """Is called with a request that has come to the host tier."""


class RequestMoves:
    """Begins moves and restores, and books their ends. A request is MOVING meanwhile."""

    def __init__(self, context: MoveContext) -> None:
        self._to = context
        self._mover = context.kv.moves
        self.under_way: dict[int, tuple[RequestState, KVMove]] = {}
        """Requests that move or are restored, with their moves, by the number of the move."""
        self.abandoned: set[int] = set()
        """Moves whose result is not used, that have not ended."""

    def __contains__(self, state: RequestState) -> bool:
        """Tell whether a request is MOVING."""
        return any(other is state for other, _ in self.under_way.values())

    @property
    def is_busy(self) -> bool:
        """A move has not ended."""
        return bool(self.under_way or self.abandoned)

    def ended(self) -> Iterator[RequestState]:
        """Yield the requests that have ended while they move."""
        yield from (state for state, _ in self.under_way.values() if state.phase is Phase.DRAINING)

    def start(self, state: RequestState, direction: MoveDirection, *, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to move a DEVICE or HOST request that stands at a token boundary; None if there is no room.

        The move is for the plan that is decided.
        """
        assert state.decodes and state.away is None, f"{state.request_id} is not at a token boundary"
        to, to_host = self._to, direction is MoveDirection.TO_HOST
        assert to.offloads, "the policy moves requests between the tiers: set its offloads to True"
        assert to.offloads_ls or state.kind is not LS, "the policy moves LS requests: set its offloads_ls to True"
        if self._mover is None or (to_host and not (to.residents.is_up and to.residents.slots.num_free)):
            return None
        move = self._mover.start(
            state.request_id,
            direction,
            keys=to.prefixes.full_keys(state) if to_host else (),
            reserve_blocks=reserve_blocks,
            keep_tokens=state.num_computed_tokens if to.keep_checkpoint and not to_host else 0,
        )
        if move is None:
            return None
        if to_host:
            to.device[state.kind].remove(state)
            to.residents.take_slot(state)
        else:
            to.residents.queue.remove(state)
        self._await(state, move)
        return move

    def start_restore(self, state: RequestState, *, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to copy what is kept of a WAITING request back; None if there is no room.

        It holds device blocks for all its tokens from now on, and is on the device when the copy is done; its tokens
        behind what was kept are uncomputed then.
        """
        restore = self._to.kept.start_restore(state, reserve_blocks=reserve_blocks)
        if restore is None:
            return None
        move, num_tokens = restore
        self._to.waiting[state.kind].remove(state)
        state.num_computed_tokens = num_tokens
        state.note_admission()
        state.blocked_since_s = None
        self._await(state, move)
        return move

    def _await(self, state: RequestState, move: KVMove) -> None:
        state.phase = Phase.MOVING
        self._to.features.on_phase(state, Phase.MOVING)
        self.under_way[move.move_id] = (state, move)
        self._to.side_work.expect(move.move_id, self._on_moved)

    def abandon(self, move_id: int) -> None:
        """Take the device memory back from a request that is moving to the host; it waits to be recomputed."""
        assert self._mover is not None
        state, _ = self.under_way.pop(move_id)
        self._mover.abandon(move_id)
        self.abandoned.add(move_id)
        self._to.side_work.expect(move_id, self._on_abandoned)
        self._to.residents.release_slot(state)
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
            self._to.kv.free(state.request_id)
        else:
            self._requeue(state)

    def _on_abandoned(self, done: Done) -> None:
        assert self._mover is not None
        self._mover.finish(done.move_id, succeeded=done.ok)
        self.abandoned.remove(done.move_id)

    def _on_moved(self, done: Done) -> None:
        """Book the end of a request's move or restore."""
        assert self._mover is not None
        to = self._to
        result = self._mover.finish(done.move_id, succeeded=done.ok)
        state, _ = self.under_way.pop(done.move_id)
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
            self._release_slot(state)
            to.kv.free(state.request_id)
            return
        if result is MoveResult.LOST:
            if state.slot >= 0:
                to.residents.release_slot(state)
                self._requeue(state)
            else:
                to.prefixes.note_lost(state)
                to.wait(state)  # it was counted when it gave way
            return
        on_host = to.kv.tier(state.request_id) is Tier.HOST
        if done.ok and state.slot >= 0:
            to.counters["swaps_out" if on_host else "swaps_in"] += 1
        if on_host:
            state.phase = Phase.HOST
            to.residents.queue.add(state)
            to.on_host(state)
            return
        if state.slot < 0 and state.first_scheduled_s is not None:
            to.counters["resumed_tokens"] += state.num_computed_tokens
        self._release_slot(state)
        state.phase = Phase.DEVICE
        to.features.on_phase(state, Phase.DEVICE)
        to.device[state.kind].add(state)

    def _release_slot(self, state: RequestState) -> None:
        if state.slot >= 0:  # a request that is restored has none
            self._to.residents.release_slot(state)

    def _requeue(self, state: RequestState) -> None:
        count_preemption(self._to.counters, state)
        self._to.wait(state)


def count_preemption(counters: Counter[str], state: RequestState) -> None:
    """Count a request that gives its memory back, and its tokens."""
    counters["preemptions"] += 1
    counters["preempted_tokens"] += state.num_computed_tokens

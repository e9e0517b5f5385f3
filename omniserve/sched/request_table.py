"""RequestTable: all requests, where each of them is, and how they change place."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

from omniserve.core.request import ServiceClass
from omniserve.core.work import AttentionResult, CancelTask, Done, HostEvent, KVMove, MoveDirection, SideWork, TierDown
from omniserve.kv.base import CanEvict, CanMove, CanShare, CanSpread, KVManager, MoveResult, Tier
from omniserve.sched.checkpoints import Checkpoints
from omniserve.sched.memory import MemoryRules
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.prefix_queue import PrefixQueue
from omniserve.sched.prefixes import Coming, Prefixes
from omniserve.sched.residents import HostResidents
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.sources import sources_of
from omniserve.sched.sources.base import KVLoads
from omniserve.sched.sources.kept import kept_of
from omniserve.sched.state import BE, LS, Phase, RequestQueue, RequestState
from omniserve.sched.state_slots import StateSlots
from omniserve.sched.step_cost import Forecast

if TYPE_CHECKING:
    from omniserve.sched.network import HostsOnNetwork

logger = logging.getLogger(__name__)


class RequestTable:
    """The requests that have not ended, the queue that each is in, and the KV moves under way.

    A request is in exactly one of ``waiting[kind]``, ``loads``, ``device[kind]``, ``residents.queue`` and ``moving``,
    by its phase, or in none of them and ENDING. WAITING, LOADING and ENDING requests have no block table. HOST requests
    hold a slot, and so do MOVING ones that come from the host tier or go there; with ``offloads``, requests may. With
    ``preempts``, plans may have preemptible rows.
    """

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager, offloads: bool, preempts: bool = False) -> None:
        self.limits = limits
        self.kv = kv
        self.states: dict[str, RequestState] = {}
        self.side_work = SideWorkQueue()
        self.hidden: set[RequestState] = set()
        """Requests that the step which is planned cannot have: the queues count them and do not yield them."""
        self.pinned: set[RequestState] = set()
        """Hidden requests that cannot give way, either."""
        self.waiting_be = PrefixQueue(self.hidden)
        self.waiting: dict[ServiceClass, RequestQueue] = {LS: RequestQueue(self.hidden), BE: self.waiting_be}
        self.device = {c: RequestQueue(self.hidden) for c in ServiceClass}
        num_slots, layers = limits.num_host_slots, {"num_layers": limits.num_layers, "late_layers": limits.late_layers}
        self.residents = HostResidents(num_slots=num_slots, **layers, hidden=self.hidden)
        self.moving: dict[int, tuple[RequestState, KVMove]] = {}
        self.abandoned_moves: set[int] = set()
        self.host_is_up = num_slots > 0
        self.counters: Counter[str] = Counter()
        """Fields of SchedulerStats that are not by class."""
        self.step_ids = itertools.count()
        self.mover = kv if isinstance(kv, CanMove) else None
        self._network = _network(limits, kv)
        self.state_slots = StateSlots(limits.num_state_slots, self.side_work)
        self.sharer = kv if isinstance(kv, CanShare) else None
        self.prefixes = Prefixes(kv, self.side_work, limits, publishes_ahead=not preempts)
        # States stand where a request's last token left them: what is kept of its KV up to an earlier one is of no use.
        can_keep = isinstance(kv, CanEvict) and not limits.num_state_slots
        self.keeps_evicted = can_keep and not self.prefixes.is_on
        """A preempted request keeps what is left of its blocks."""
        self._kept = kept_of(kv, self.prefixes, keeps_evicted=self.keeps_evicted)
        kinds = sources_of(limits.config, kv)
        self.loads = KVLoads(kinds, kv, self.prefixes, self.side_work, limits, self.waiting)
        self._offloads = offloads
        self.memory = MemoryRules(
            limits,
            kv,
            self.prefixes,
            residents=self.residents,
            waiting=self.waiting,
            device=self.device,
            moving=self.moving,
            offloads=offloads,
        )
        """How much memory requests may take."""
        self._draining: dict[int, RequestState] = {}
        num_copied = limits.checkpoint_blocks if (can_keep or offloads) and num_slots > 0 else 0
        self.checkpoints = Checkpoints(kv, self.side_work, max_blocks_per_step=num_copied)

    # -- arrivals and ends ---------------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Put a new request into its queue.

        Raises:
            ValueError: A request of that id has ended, but a copy or a host task still uses its KV.
        """
        if any(ended.request_id == state.request_id for ended in self.ended()):
            raise ValueError(
                f"request id {state.request_id!r} is of a request that has ended, but whose KV a copy or a host task "
                "still uses; choose another"
            )
        self.states[state.request_id] = state
        if self.sharer is not None:
            self.sharer.declare(state.request_id, state.kind)
        self.prefixes.note_arrival(state)
        self.waiting[state.kind].add(state)

    def end(self, state: RequestState) -> None:
        """Forget a request; its KV is freed now, or when the copy or host task that uses it is over."""
        del self.states[state.request_id]
        self.let_go(state, Phase.FINISHED)

    def let_go(self, state: RequestState, into: Phase) -> None:
        """Take a request from where it is; its phase is ``into``, or DRAINING if something still uses its KV."""
        phase, state.phase = state.phase, into
        self.state_slots.release(state)
        if phase is Phase.MOVING:
            state.phase = Phase.DRAINING
        elif phase is Phase.HOST:
            if self.residents.withdraw(state):
                state.phase = Phase.DRAINING
                self._draining[state.slot] = state
                self.side_work.begin(CancelTask(slot=state.slot))
            else:
                self._leave_host(state)
        elif phase is Phase.LOADING:
            self.loads.forget(state)
        elif phase in (Phase.WAITING, Phase.DEVICE):
            (self.waiting if phase is Phase.WAITING else self.device)[state.kind].remove(state)
            self.kv.free(state.request_id)

    def ended(self) -> Iterator[RequestState]:
        """Yield the requests that have ended, but a copy or a host task still uses their KV."""
        yield from (state for state, _ in self.moving.values() if state.phase is Phase.DRAINING)
        yield from self._draining.values()

    @property
    def is_empty(self) -> bool:
        """True if no request is left, and no slot, move or copy has to be given back.

        Copies of cached prefixes to the host do not count: no request waits for them.
        """
        is_busy = self.checkpoints.busy or self.side_work.is_pending
        return not (self.states or self.moving or self.abandoned_moves or self._draining or is_busy)

    # -- changes of place ----------------------------------------------------------------------------------------

    def admit(self, state: RequestState) -> None:
        """Book that a WAITING request has its first chunk, and so its blocks, on the device."""
        self.prefixes.note_admission(state)
        self.prefixes.take_states(state)  # of no use if the KV was not all there any more
        self.waiting[state.kind].remove(state)
        state.phase = Phase.DEVICE
        state.blocked_since_s = None
        self.device[state.kind].add(state)

    def start_loading(self, forecast: Forecast | None, now_s: float) -> None:
        """Take WAITING requests from their queues whose KV is to come from a source.

        They come back when it is there.
        """
        if self.host_is_up:
            self.loads.start(forecast, now_s, running_ls=self.device[LS], reserve_blocks=self.memory.host_headroom)

    def give_up_prefixes(self) -> None:
        """Find, publish, copy and write no prefixes any more; to be called when a step has failed."""
        self.prefixes.give_up()
        self.loads.give_up()

    def coming(self, state: RequestState) -> Coming | None:
        """Return the KV that will be copied to the device for a new WAITING request; None: nothing."""
        return self.loads.coming(state) if self.prefixes.is_on and self.host_is_up else None

    def preempt(self, state: RequestState) -> None:
        """Take a request's memory back; it waits, in arrival order, to be resumed. Its tokens are kept.

        What the KV manager does not keep of its KV is recomputed then.
        """
        if state.phase is Phase.DEVICE:
            self.device[state.kind].remove(state)
        elif state.phase is Phase.HOST:
            self.residents.queue.remove(state)
            self.residents.release_slot(state)
        else:
            raise RuntimeError(f"request {state.request_id} cannot be preempted while {state.phase}")
        self._kept.take_from(state)
        self._requeue(state)

    def start_move(self, state: RequestState, direction: MoveDirection, *, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to move a DEVICE or HOST request that stands at a token boundary; None if there is no room.

        The move is for the plan that is decided.
        """
        assert state.decodes and state.away is None, f"{state.request_id} is not at a token boundary"
        assert self._offloads, "the policy moves requests between the tiers: set its offloads to True"
        to_host = direction is MoveDirection.TO_HOST
        if self.mover is None or (to_host and (not self.host_is_up or self.residents.num_free_slots == 0)):
            return None
        if to_host and self.prefixes.shares_on_host:
            move = self.prefixes.start_move_to_host(state, reserve_blocks=reserve_blocks)
        else:
            keep_tokens = state.num_computed_tokens if not to_host and self.checkpoints.are_made else 0
            move = self.mover.start_move(
                state.request_id, direction, reserve_blocks=reserve_blocks, keep_tokens=keep_tokens
            )
        if move is None:
            return None
        state.halted = None
        if to_host:
            self.device[state.kind].remove(state)
            self.residents.take_slot(state)
        else:
            self.residents.queue.remove(state)
        self._await_move(state, move)
        return move

    def _await_move(self, state: RequestState, move: KVMove) -> None:
        state.phase = Phase.MOVING
        self.moving[move.move_id] = (state, move)
        self.side_work.expect(move.move_id, self._on_moved)

    def needs_restore(self, state: RequestState) -> bool:
        """Tell whether the host has KV of a WAITING request that the device has not (any more)."""
        return self.host_is_up and self._kept.needs_restore(state)

    def num_kept_tokens(self, state: RequestState, tier: Tier) -> int:
        """Return how many first tokens of a WAITING request still have their KV on a tier.

        Of one that was evicted (``CanEvict``), or, on the device, in the prefix cache.
        """
        return self._kept.num_tokens(state, tier)

    def allocate(self, state: RequestState, *, reserve_blocks: int) -> tuple[int, ...] | None:
        """Return device blocks for all known tokens of a WAITING or DEVICE request; None: there is no room."""
        if state.phase is Phase.WAITING and self.prefixes.num_tokens(state):
            return self.prefixes.allocate(state, reserve_blocks=reserve_blocks)
        return self.kv.allocate(state.request_id, state.num_tokens, reserve_blocks=reserve_blocks)

    def start_restore(self, state: RequestState, *, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to copy a WAITING request back that needs it; None if there is no room.

        It holds device blocks for all its tokens from now on, and is on the device, with those behind its checkpoint
        uncomputed, when the copy is done.
        """
        restore = self._kept.start_restore(state, reserve_blocks=reserve_blocks)
        if restore is None:
            return None
        move, num_tokens = restore
        self.waiting[state.kind].remove(state)
        self.state_slots.of(state)
        state.num_computed_tokens = num_tokens
        state.blocked_since_s = None
        self._await_move(state, move)
        return move

    def abandon_move(self, move_id: int) -> None:
        """Take the device memory back from a request that is moving to the host; it waits to be recomputed."""
        assert self.mover is not None
        state, _ = self.moving.pop(move_id)
        self.mover.abandon_move(move_id)
        self.abandoned_moves.add(move_id)
        self.side_work.expect(move_id, self._on_abandoned)
        self.residents.release_slot(state)
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
            self.kv.free(state.request_id)
        else:
            self._requeue(state)

    def runs_from_right(self, state: RequestState) -> bool:
        """Tell whether the request's tokens fill its device blocks from the right; see ``CanShare``."""
        return self.sharer is not None and self.sharer.runs_from_right(state.request_id)

    def take_work(self, moves: Iterable[KVMove], unseen: Set[str]) -> tuple[SideWork, ...]:
        """Return, once, all that the plan that is decided starts beside its rows.

        Args:
            moves: The moves that were begun for the plan.
            unseen: Requests that the plan admits: what they have found may be written by its step only, so nothing of
                it is copied yet.
        """
        for move in moves:
            self.side_work.begin(move)
        if self.host_is_up:
            known = (state for state in self.device[BE] if state.request_id not in unseen)
            self.checkpoints.begin(known, reserve_blocks=self.memory.host_headroom)
            self.prefixes.save(reserve_blocks=self.memory.host_headroom)
        self.loads.write()
        # Copies on the device come first: the others may read what they have written.
        relocations = self.sharer.take_relocations() if self.sharer is not None else ()
        return (*relocations, *self.side_work.take())

    # -- what happens beside the steps ---------------------------------------------------------------------------

    def notify(self, events: Sequence[HostEvent]) -> None:
        """Book what finished beside the steps: host attention and KV moves."""
        for event in events:
            match event:
                case Done():
                    self.side_work.finish(event)
                case AttentionResult():
                    self._finish_attention(event)
                case TierDown():
                    self.host_is_up = False
                    for state in self.residents.queue.everyone():
                        if state.away is None:
                            self.preempt(state)
                case _:
                    self.loads.on_event(event)
                    if self._network is not None:
                        self._network.on_event(event)
        if self._network is not None and self._network.has_lost:
            self._leave_lost_hosts(self._network)

    def _leave_lost_hosts(self, network: HostsOnNetwork) -> None:
        """Preempt the requests on lost hosts whose token is not away; that of others fails, or comes to its end."""
        lost = [state for state in self.residents.queue.everyone() if network.is_lost(state)]
        for state in lost:
            if state.away is None:
                self.preempt(state)
        moving = (state for state, _ in self.moving.values())
        has_on_lost = any(map(network.is_lost, (*moving, *self.ended())))
        network.has_lost = has_on_lost or any(state.phase is Phase.HOST for state in lost)

    def _finish_attention(self, event: AttentionResult) -> None:
        was_used = self.residents.take_used(event)
        ended = self._draining.get(event.slot)
        if ended is not None and ended.epoch == event.epoch:
            if not self.residents.is_last(event, ended):
                return
            del self._draining[event.slot]
            ended.phase = Phase.FINISHED
            self._leave_host(ended)
            return
        state = self.residents.on_event(event)
        if state is None:
            if not was_used:
                logger.warning("dropped a stale host result: %s", event)
        elif not event.ok:
            self.preempt(state)

    def _on_abandoned(self, done: Done) -> None:
        assert self.mover is not None
        self.mover.finish_move(done.move_id, succeeded=done.ok)
        self.abandoned_moves.remove(done.move_id)

    def _on_moved(self, done: Done) -> None:
        """Book the end of a request's move or restore."""
        assert self.mover is not None
        result = self.mover.finish_move(done.move_id, succeeded=done.ok)
        state, _ = self.moving.pop(done.move_id)
        on_host = self.kv.tier(state.request_id) is Tier.HOST
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
            self._leave_host(state)
            return
        if result is MoveResult.LOST:
            if state.slot >= 0:
                self.residents.release_slot(state)
                self._requeue(state)
            else:
                self.prefixes.note_lost(state)
                self._wait(state)  # it was counted when it gave way
            return
        if done.ok and state.slot >= 0:
            self.counters["swaps_out" if on_host else "swaps_in"] += 1
        if on_host:
            state.phase = Phase.HOST
            self.residents.queue.add(state)
            if not self.host_is_up or (self._network is not None and self._network.is_lost(state)):
                self.preempt(state)
        else:
            if state.slot < 0 and state.first_scheduled_s is not None:
                self.counters["resumed_tokens"] += state.num_computed_tokens
            self._release_slot(state)
            if (states := self.prefixes.take_states(state)) is not None:
                self.state_slots.load(state, states)
            state.phase = Phase.DEVICE
            self.device[state.kind].add(state)

    def _requeue(self, state: RequestState) -> None:
        self.counters["preemptions"] += 1
        self.counters["preempted_tokens"] += state.num_computed_tokens
        self._wait(state)

    def _wait(self, state: RequestState) -> None:
        self.state_slots.release(state)
        self.loads.look_again(state)
        state.num_computed_tokens = 0
        state.halted = None
        state.phase = Phase.WAITING
        self.waiting[state.kind].add(state)

    def _leave_host(self, state: RequestState) -> None:
        self._release_slot(state)
        self.kv.free(state.request_id)

    def _release_slot(self, state: RequestState) -> None:
        if state.slot >= 0:  # a request that is restored has none
            self.residents.release_slot(state)

    # -- what policies ask ---------------------------------------------------------------------------------------

    @property
    def num_preemptions(self) -> int:
        return self.counters["preemptions"]

    def is_only_ls(self, state: RequestState) -> bool:
        """Return whether there is no other LS request."""
        return not any(other.kind is LS and other is not state for other in self.states.values())

    def host_blocks_for(self, state: RequestState) -> tuple[int, ...] | None:
        """Return blocks for a resident's newest token; if its host is full, the youngest one there is recomputed."""
        blocks = self.kv.allocate(state.request_id, state.num_tokens)
        if blocks is None and self._is_youngest_there(state):
            self.preempt(state)
        return blocks

    def _is_youngest_there(self, state: RequestState) -> bool:
        """Tell whether no younger resident is on the same host."""
        youngest_first = reversed(self.residents.queue)
        if self._network is None:
            return next(youngest_first) is state
        return self._network.is_youngest(state, youngest_first)

    def check_integrity(self) -> None:
        """Verify the class's invariants and the KV manager's; for tests and debugging.

        Raises:
            AssertionError: With what does not fit.
        """
        self.kv.check_integrity()
        for state in self.states.values():
            phase, about = state.phase, (state.request_id, state.phase, state.slot)
            homes = {
                Phase.WAITING: state in self.waiting[state.kind],
                Phase.LOADING: state in self.loads,
                Phase.DEVICE: state in self.device[state.kind],
                Phase.HOST: state in self.residents.queue,
                Phase.MOVING: any(other is state for other, _ in self.moving.values()),
                Phase.ENDING: phase is Phase.ENDING,
            }
            assert [home for home, is_there in homes.items() if is_there] == [phase], (about, homes)
            num_blocks = self.kv.num_blocks(state.request_id)
            has_none = phase in (Phase.WAITING, Phase.LOADING, Phase.ENDING)
            assert (num_blocks == 0) == has_none, (about, num_blocks)
            may_hold, must_hold = phase in (Phase.HOST, Phase.MOVING), phase is Phase.HOST
            assert may_hold if state.slot >= 0 else not must_hold, about
        self.state_slots.check([*self.states.values()])
        held = self.residents.num_slots_used
        on_host = sum(s.slot >= 0 for s in (*self.states.values(), *self.ended()))
        assert held == on_host, f"{held} slots are taken, {on_host} requests hold one"


def _network(limits: SchedulerLimits, kv: KVManager) -> HostsOnNetwork | None:
    """Return the books of the CPU hosts on the network; None if there are none."""
    if not limits.config.hosts.cpu_hosts or not isinstance(kv, CanSpread):
        return None
    from omniserve.sched.network import HostsOnNetwork

    return HostsOnNetwork(kv)

"""RequestTable: all requests, where each of them is, and how they change place."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

from omniserve.core.request import ServiceClass
from omniserve.core.work import AttentionResult, CancelTask, Done, HostEvent, KVMove, SideWork, TierDown
from omniserve.kv.base import KVManager
from omniserve.sched.checkpoints import Checkpoints
from omniserve.sched.fairness import Account, ClassAccounts
from omniserve.sched.features import StepFeatures
from omniserve.sched.features.base import PLAIN_SETTINGS, FeatureContext, FeatureSettings
from omniserve.sched.lora_slots import LoRASlots
from omniserve.sched.memory import MemoryRules
from omniserve.sched.moves import MoveContext, RequestMoves, count_preemption
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.prefix_queue import PrefixQueue
from omniserve.sched.prefixes import Prefixes
from omniserve.sched.prefixes_on_host import PrefixesOnHost
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.residents import HostResidents
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.sources import sources_of
from omniserve.sched.sources.base import KVLoads
from omniserve.sched.sources.kept import kept_of
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import Forecast

if TYPE_CHECKING:
    from omniserve.sched.network import HostsOnNetwork

logger = logging.getLogger(__name__)


class RequestTable:
    """The requests that have not ended, and the queue that each is in.

    A request is in exactly one of ``waiting[kind]``, ``loads``, ``device[kind]``, ``residents.queue`` and ``moves``,
    by its phase, or in none of them and ENDING. WAITING, LOADING and ENDING requests have no block table. HOST requests
    hold a slot, and so do MOVING ones that come from the host tier or go there; with ``offloads``, BE requests may, and
    with ``offloads_ls`` LS ones, too.
    """

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        kv: KVManager,
        offloads: bool,
        offloads_ls: bool = False,
        settings: FeatureSettings = PLAIN_SETTINGS,
    ) -> None:
        self.limits, self.kv = limits, kv
        self.states: dict[str, RequestState] = {}
        self.side_work = SideWorkQueue()
        self.counters: Counter[str] = Counter()
        """Fields of SchedulerStats that are not by class."""
        self.step_ids = itertools.count()
        self.hidden: set[RequestState] = set()
        """Requests that the step which is planned cannot have: the queues count them and do not yield them."""
        self.pinned: set[RequestState] = set()
        """Hidden requests that cannot give way, either."""
        self.waiting_be = PrefixQueue(self.hidden)
        self.waiting: dict[ServiceClass, RequestQueue] = {LS: RequestQueue(self.hidden), BE: self.waiting_be}
        self.device = {c: RequestQueue(self.hidden) for c in ServiceClass}
        self.accounts = {spec.name: ClassAccounts() for spec in limits.config.classes}
        """What the tenants of each class were given."""
        self.residents = HostResidents(limits, self.hidden)
        self._draining: dict[int, RequestState] = {}
        self._network = _network(kv)
        context = FeatureContext(
            kv=kv, limits=limits, side_work=self.side_work, settings=settings, counters=self.counters
        )
        self.features = StepFeatures(context)
        self.prefixes = Prefixes(kv, limits, publishes_ahead=not settings.options.preempts)
        self.prefixes_on_host = PrefixesOnHost(kv, self.prefixes, self.side_work, limits)
        can_keep = kv.evictions is not None and limits.can_resume
        self.keeps_evicted = can_keep and not self.prefixes.is_on
        """A preempted request keeps what is left of its blocks."""
        self.kept = kept_of(kv, self.prefixes, self.prefixes_on_host, keeps_evicted=self.keeps_evicted)
        """What need not be recomputed of WAITING requests."""
        kinds = sources_of(limits.config, kv)
        self.loads = KVLoads(kinds, kv, self.prefixes_on_host, self.side_work, limits, self.waiting)
        self.loras: LoRASlots | None = None
        """The adapters in memory; None: requests cannot name any."""
        if max_loras := limits.config.lora.max_loras:
            turn = limits.config.max_num_seqs
            self.loras = LoRASlots(
                max_loras, turn, self.side_work, release=self.loads.release, withdraw=self._wait_for_lora
            )
        num_copied = limits.checkpoint_blocks if (can_keep or offloads) and limits.num_host_slots else 0
        self.checkpoints = Checkpoints(kv, self.side_work, max_blocks_per_step=num_copied)
        self.moves = RequestMoves(self._move_context(offloads=offloads, offloads_ls=offloads_ls))
        self.memory = MemoryRules(
            limits,
            kv,
            self.prefixes,
            residents=self.residents,
            waiting=self.waiting,
            device=self.device,
            moving=self.moves.under_way,
            offloads=offloads,
        )
        """How much memory requests may take."""

    def _move_context(self, *, offloads: bool, offloads_ls: bool) -> MoveContext:
        return MoveContext(
            kv=self.kv,
            prefixes=self.prefixes_on_host,
            kept=self.kept,
            residents=self.residents,
            side_work=self.side_work,
            features=self.features,
            waiting=self.waiting,
            device=self.device,
            counters=self.counters,
            offloads=offloads,
            offloads_ls=offloads_ls,
            keep_checkpoint=self.checkpoints.are_made,
            wait=self._wait,
            on_host=self._on_host,
        )

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
        self.features.on_arrival(state)
        state.account.enter(self._waiting_accounts(state.kind))
        self.states[state.request_id] = state
        self.prefixes.note_arrival(state)
        if self.loras is not None and not self.loras.enter(state):
            self.loads.hold(state, self.loras)
        else:
            self.waiting[state.kind].add(state)

    def account_of_newcomer(self, service_class: str, tenant: str = "") -> Account:
        """Return the account that a request of a class and a tenant would have if it came now; nothing changes."""
        kind = ServiceClass(self.limits.config.class_named(service_class).kind)
        return self.accounts[service_class].at_entry(tenant, self._waiting_accounts(kind))

    def _waiting_accounts(self, kind: ServiceClass) -> Iterator[Account]:
        """Yield the accounts with requests of a kind that wait, and with LOADING ones of both kinds; some twice."""
        return itertools.chain(self.waiting[kind].accounts, self.loads.accounts)

    def end(self, state: RequestState) -> None:
        """Forget a request; its KV is freed now, or when the copy or host task that uses it is over."""
        del self.states[state.request_id]
        self.let_go(state, Phase.FINISHED)
        state.account.leave()

    def let_go(self, state: RequestState, into: Phase) -> None:
        """Take a request from where it is; its phase is ``into``, or DRAINING if something still uses its KV."""
        phase, state.phase = state.phase, into
        self.features.on_phase(state, into)
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
            self.kv.free(state.request_id)  # it has no table, but the manager may know of it
        elif phase in (Phase.WAITING, Phase.DEVICE):
            (self.waiting if phase is Phase.WAITING else self.device)[state.kind].remove(state)
            self.kv.free(state.request_id)
        if self.loras is not None and into is Phase.FINISHED:
            self.loras.leave(state)  # last: others of its adapter may be taken from their queue

    def ended(self) -> Iterator[RequestState]:
        """Yield the requests that have ended, but a copy or a host task still uses their KV."""
        yield from self.moves.ended()
        yield from self._draining.values()

    @property
    def is_empty(self) -> bool:
        """True if no request is left, and no slot, move or copy has to be given back.

        Copies of cached prefixes to the host do not count: no request waits for them.
        """
        is_busy = self.moves.is_busy or self.checkpoints.busy or self.side_work.is_pending
        return not (self.states or self._draining or is_busy)

    # -- changes of place ----------------------------------------------------------------------------------------

    def admit(self, state: RequestState) -> None:
        """Book that a WAITING request has its first chunk, and so its blocks, on the device."""
        self.prefixes.note_admission(state)
        state.note_admission()
        self.waiting[state.kind].remove(state)
        state.phase = Phase.DEVICE
        state.blocked_since_s = None
        self.device[state.kind].add(state)

    def start_loading(self, forecast: Forecast | None, now_s: float) -> None:
        """Take WAITING requests from their queues whose KV is to come from a source.

        They come back when it is there.
        """
        if self.loads.sources and self.residents.is_up:
            self.loads.start(forecast, now_s, running_ls=self.device[LS], reserve_blocks=self.memory.host_headroom)

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
        self.kept.take_from(state)
        count_preemption(self.counters, state)
        self._wait(state)

    def allocate(self, state: RequestState, *, reserve_blocks: int) -> tuple[int, ...] | None:
        """Return device blocks for all known tokens of a WAITING or DEVICE request; None: there is no room."""
        if state.phase is Phase.WAITING and self.prefixes.num_tokens(state):
            return self.prefixes.allocate(state, reserve_blocks=reserve_blocks)
        return self.kv.allocate(state.request_id, state.num_tokens, reserve_blocks=reserve_blocks)

    def take_work(self, moves: Iterable[KVMove], unseen: Set[str]) -> tuple[SideWork, ...]:
        """Return, once, all that the plan that is decided starts beside its rows.

        Args:
            moves: The moves that were begun for the plan.
            unseen: Requests that the plan admits: what they have found may be written by its step only, so nothing of
                it is copied yet.
        """
        for move in moves:
            self.side_work.begin(move)
        if self.residents.is_up:
            if self.checkpoints.are_made:
                known = (state for state in self.device[BE] if state.request_id not in unseen)
                self.checkpoints.begin(known, reserve_blocks=self.memory.host_headroom)
            self.prefixes_on_host.save(reserve_blocks=self.memory.host_headroom)
        if self.loads.sources:
            self.loads.write()
        first = itertools.chain.from_iterable(feature.take_work() for feature in self.features.on)
        return (*first, *self.side_work.take())

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
                    self.residents.is_up = False
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
        moving = (state for state, _ in self.moves.under_way.values())
        has_on_lost = any(map(network.is_lost, (*moving, *self.ended())))
        network.has_lost = has_on_lost or any(state.phase is Phase.HOST for state in lost)

    def _finish_attention(self, event: AttentionResult) -> None:
        was_used = self.residents.tokens.take_used(event)
        ended = self._draining.get(event.slot)
        if ended is not None and ended.epoch == event.epoch:
            if not self.residents.tokens.is_last(event, ended):
                return
            del self._draining[event.slot]
            ended.phase = Phase.FINISHED
            self._leave_host(ended)
            return
        state = self.residents.tokens.on_event(event)
        if state is None:
            if not was_used:
                logger.warning("dropped a stale host result: %s", event)
        elif not event.ok:
            self.preempt(state)

    def _on_host(self, state: RequestState) -> None:
        """Take note that a request has come to the host tier, which may be lost by now."""
        if not self.residents.is_up or (self._network is not None and self._network.is_lost(state)):
            self.preempt(state)

    def _wait_for_lora(self, digest: str, kinds: Iterable[ServiceClass]) -> list[RequestState]:
        """Take requests of an adapter that have not begun from their queues: it will not be in memory for them."""
        assert self.loras is not None
        waiting = (state for kind in kinds for state in self.waiting[kind].everyone())
        found = [state for state in waiting if state.adapter == digest and state.first_scheduled_s is None]
        for state in found:
            self.waiting[state.kind].remove(state)
            self.loads.hold(state, self.loras)
        return found

    def _wait(self, state: RequestState) -> None:
        """Put a request that has no table any more into its queue."""
        self.features.on_phase(state, Phase.WAITING)
        self.loads.look_again(state)
        state.num_computed_tokens = 0
        state.phase = Phase.WAITING
        self.waiting[state.kind].add(state)

    def _leave_host(self, state: RequestState) -> None:
        self.residents.release_slot(state)
        self.kv.free(state.request_id)

    # -- what policies ask ---------------------------------------------------------------------------------------

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
                Phase.MOVING: state in self.moves,
                Phase.ENDING: phase is Phase.ENDING,
            }
            assert [home for home, is_there in homes.items() if is_there] == [phase], (about, homes)
            num_blocks = self.kv.num_blocks(state.request_id)
            has_none = phase in (Phase.WAITING, Phase.LOADING, Phase.ENDING)
            assert (num_blocks == 0) == has_none, (about, num_blocks)
            may_hold, must_hold = phase in (Phase.HOST, Phase.MOVING), phase is Phase.HOST
            assert may_hold if state.slot >= 0 else not must_hold, about
        for feature in self.features.on:
            feature.check([*self.states.values()])
        if self.loras is not None:
            self.loras.check(self.states.values())
        held = self.residents.slots.num_used
        on_host = sum(s.slot >= 0 for s in (*self.states.values(), *self.ended()))
        assert held == on_host, f"{held} slots are taken, {on_host} requests hold one"


def _network(kv: KVManager) -> HostsOnNetwork | None:
    """Return the books of the CPU hosts on the network; None if there are none."""
    if kv.network is None:
        return None
    from omniserve.sched.network import HostsOnNetwork

    return HostsOnNetwork(kv.network)

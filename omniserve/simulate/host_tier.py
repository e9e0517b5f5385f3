"""SimulatedHostTier: the host tier's queues, threads and copies on a virtual clock.

The real tier cuts tasks into pieces, so that all of a host's threads work on the oldest ones: a host is modelled as one
server whose speed is that of its threads together, and a task that has few pieces takes at least as long as its
largest share does on one thread. With several stages each has an equal part of every host's threads, which attend for
its layers: a server for each. Copies go over lanes of their own (a GPU's side stream), or are made by the threads
themselves, ahead of attention (a CPU device).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omniserve.core.plan import PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.spec import ModelSpec
from omniserve.core.work import AttentionResult, Done, HostEvent, KVMove, MoveDirection
from omniserve.latency.features import AlphaBeta
from omniserve.simulate.placement import Place, Placement, split_blocks

_PIECE_KEYS = 256
"""Keys of a piece of the real tier, about; a task is on as many threads as it has pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNode:
    """The speed of a host's threads for a layer of a model, in seconds."""

    num_threads: int
    key_s: float
    """Seconds for a key of a request with all threads at work."""
    task_s: float
    """Seconds for a task, besides those of its keys, with all threads at work."""
    draft_key_s: float = 0.0
    """Seconds for a key that a draft sees, besides those of the draft's token, with all threads at work."""
    latency_s: float = 0.0
    """Seconds from the step to a thread and back, with the network's for a remote host."""
    move_byte_s: float = 0.0
    """Seconds that a moved byte takes beyond those of the device's own link, over a slower network."""
    memory: float = 1.0
    """The host's part of the host pool, in proportion to the other hosts'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """The link over which KV moves between the tiers, one move at a time."""

    to_host: AlphaBeta
    to_device: AlphaBeta
    by_host_threads: bool = False
    """The host's threads copy, before they attend; else copies run beside them."""


_Work = tuple[float, float, float, HostEvent | None]
"""(comes at, seconds of the server, least seconds to the event, event if there is one)."""


@dataclass(slots=True)
class _Server:
    """Serves in order of arrival, urgent work first."""

    urgent: deque[_Work] = field(default_factory=deque)
    queue: deque[_Work] = field(default_factory=deque)
    free_s: float = -math.inf

    def next(self) -> tuple[float, deque[_Work]] | None:
        """Return when the next piece of work begins, and its queue; None if there is none."""
        begins = [(max(self.free_s, work[0][0]), work) for work in (self.urgent, self.queue) if work]
        return min(begins, key=lambda begin: begin[0], default=None)


class SimulatedHostTier:
    """Takes what plans hand over and gives back events, as the real tier does.

    A cancelled task (its request has ended) is worked on all the same; its event comes when it is done.

    Each host has its part of the memory, and a request is on one host (``Placement``). One that outgrows it goes to
    another one, over the network, before it attends there.

    Args:
        nodes: The hosts, the device's own first.
        copies: Moves.
        spec: The model's sizes.
        block_size: Tokens per block.
        kv_dtype: The dtype of the device's KV, in which it is copied.
        num_blocks: Blocks of the pool, all hosts together.
        num_stages: Stages of the model.
        held: Returns how many of them a request holds.

    Raises:
        ValueError: There is no host.
    """

    def __init__(
        self,
        nodes: Sequence[HostNode],
        copies: Copies,
        spec: ModelSpec,
        block_size: int,
        *,
        kv_dtype: str = "auto",
        num_blocks: int,
        num_stages: int = 1,
        held: Callable[[str], int],
    ) -> None:
        if not nodes:
            raise ValueError("a host tier needs at least one host")
        self._nodes = tuple(nodes)
        self._copies = copies
        self._attention = spec.attention
        self._last_layer = spec.num_layers - 1
        self._block_bytes = spec.host_block_bytes(block_size, kv_dtype)
        self._num_layers, self._num_stages = spec.num_layers, num_stages
        self._hosts = [[_Server() for _ in nodes] for _ in range(num_stages)]
        """The servers of the hosts, by stage."""
        self._link = _Server()
        self._servers = [*itertools.chain.from_iterable(self._hosts), self._link]
        self._events: list[tuple[float, int, HostEvent]] = []
        self._results: dict[int, tuple[float, int, AttentionResult]] = {}
        """Slot -> its attention event among these; one that a late join has used is no event any more."""
        self._used: set[int] = set()
        self._order = itertools.count()
        self._placement = Placement(split_blocks(num_blocks, [node.memory for node in nodes]), held)
        self._in_hand = self._tasks_in_hand = 0
        self.busy_s = 0.0
        """Counter: seconds that hosts spent attending, summed over hosts."""

    @property
    def attends(self) -> bool:
        """True while tasks are in hand; moves do not count."""
        return self._tasks_in_hand > 0

    def start_move(self, move: KVMove, now_s: float) -> None:
        """Begin a move, at the start of its step."""
        is_out = move.direction is MoveDirection.TO_HOST
        if not move.request_id or not (is_out or self._placement.has(move.request_id)):
            place = Place(0)  # blocks of prefixes, which are on the device's own host
        elif is_out:
            place = self._placement.arrive(move.request_id, len(move.dst_block_ids))
        else:
            place = Place(self._placement.host_of(move.request_id))
        seconds = self._move_s(move, place.host) + self._relocate_s(place)
        self._in_hand += 1
        done = Done(move_id=move.move_id, ok=True)
        if not self._copies.by_host_threads:
            self._link.queue.append((now_s, seconds, seconds, done))
            return
        for stage, hosts in enumerate(self._hosts):  # each copies its own layers' part, in the same time
            hosts[place.host].urgent.append((now_s, seconds, seconds, None if stage else done))

    def has_result(self, join: PiggybackJoin, at_s: float) -> bool:
        """Return whether the result of a late join is there at a time, which may be later than now."""
        for server in self._hosts[stage_of(join.layer, self._num_layers, self._num_stages)]:
            self._serve(server, at_s)
        done_s, _, event = self._results.get(join.slot, (math.inf, -1, None))
        if event is None or done_s > at_s:
            return False
        return (event.epoch, event.layer, event.position) == (join.epoch, join.layer, join.position)

    def use_result(self, join: PiggybackJoin) -> None:
        """Let a late join have its result: no event tells of it any more."""
        self._used.add(self._results.pop(join.slot)[1])

    def submit(self, plan: StepPlan, sent_s: Callable[[int], float]) -> None:
        """Take the rows that a step sends: its entries at layer 0, its joins at the layer after theirs.

        Args:
            plan: The step, with only the joins that joined.
            sent_s: Returns when the rows of a layer are sent.
        """
        sent: list[tuple[PiggybackEntry | PiggybackJoin, int]] = [(entry, 0) for entry in plan.entries]
        sent += [(join, join.layer + 1) for join in plan.joins if join.layer < self._last_layer]
        for row, layer in sent:
            self._submit(row, layer, sent_s(layer))
        for row in plan.pipelined:  # the step's time has their attention
            if isinstance(row, PiggybackEntry):
                self._placement.grow(row.request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, so that its host has room for others."""
        self._placement.forget(request_id)

    def poll(self, now_s: float) -> list[HostEvent]:
        """Return what is done by now."""
        if not self._in_hand:
            return []
        for server in self._servers:
            self._serve(server, now_s)
        done: list[HostEvent] = []
        events = self._events
        num_used = 0
        while events and events[0][0] <= now_s:
            _, order, event = heapq.heappop(events)
            if order in self._used:
                self._used.remove(order)
                num_used += 1
                continue
            if isinstance(event, AttentionResult):
                self._results.pop(event.slot, None)
            done.append(event)
        self._in_hand -= len(done) + num_used
        self._tasks_in_hand -= sum(isinstance(event, AttentionResult) for event in done) + num_used
        return done

    def next_event_s(self) -> float | None:
        """Return when the next event comes if nothing else is handed over; None: never."""
        if not self._in_hand:
            return None
        while not self._events:
            # What begins next is not necessarily done next, but no event can come before something begins.
            begins = [upcoming[0] for server in self._servers if (upcoming := server.next()) is not None]
            at_s = min(begins)
            for server in self._servers:
                self._serve(server, at_s)
        return self._events[0][0]

    def _submit(self, row: PiggybackEntry | PiggybackJoin, layer: int, at_s: float) -> None:
        is_new = isinstance(row, PiggybackEntry)  # and may have taken blocks
        place = self._placement.grow(row.request_id) if is_new else Place(self._placement.host_of(row.request_id))
        node = self._nodes[place.host]
        keys = row.position + 1 - self._attention[layer].first_key(row.position)
        seconds = (node.key_s + node.draft_key_s * len(row.draft_ids)) * keys + node.task_s
        num_threads = node.num_threads / self._num_stages
        threads = min(num_threads, keys // _PIECE_KEYS + 1)
        event = AttentionResult(slot=row.slot, epoch=row.epoch, layer=layer, position=row.position)
        least_s = seconds * node.num_threads / threads + node.latency_s + self._relocate_s(place)
        hosts = self._hosts[stage_of(layer, self._num_layers, self._num_stages)]
        hosts[place.host].queue.append((at_s, seconds * self._num_stages, least_s, event))
        self._in_hand += 1
        self._tasks_in_hand += 1
        self.busy_s += seconds

    def _serve(self, server: _Server, now_s: float) -> None:
        """Begin all work of a server that begins by now."""
        while (upcoming := server.next()) is not None and upcoming[0] <= now_s:
            begin_s, queue = upcoming
            _, seconds, least_s, event = queue.popleft()
            server.free_s = begin_s + seconds
            if event is None:
                continue
            order = next(self._order)
            heapq.heappush(self._events, (begin_s + least_s, order, event))
            if isinstance(event, AttentionResult):
                self._results[event.slot] = begin_s + least_s, order, event

    def _move_s(self, move: KVMove, node: int) -> float:
        num_bytes = len(move.src_block_ids) * self._block_bytes
        link = self._copies.to_host if move.direction is MoveDirection.TO_HOST else self._copies.to_device
        return link(num_bytes) + self._nodes[node].move_byte_s * num_bytes

    def _relocate_s(self, place: Place) -> float:
        """Return the seconds for what a request had on another host."""
        if not place.num_relocated:
            return 0.0
        num_bytes = place.num_relocated * self._block_bytes
        byte_s = max(self._nodes[host].move_byte_s for host in (place.source, place.host))
        return self._copies.to_host(num_bytes) + byte_s * num_bytes


def stage_of(layer: int, num_layers: int, num_stages: int) -> int:
    """Return the stage that has a layer, as ``omniserve.parallel.place`` shares them out."""
    return layer * num_stages // num_layers

"""HostResidents: which requests decode on the host tier, and what of them a step can take.

A request that ends while its token is away *drains*: its slot and blocks are freed when the host tier says that no
thread touches them any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set

from omniserve.core.plan import PiggybackEntry, PiggybackJoin
from omniserve.sched.away_tokens import AwayTokens
from omniserve.sched.host_slots import HostSlots
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.state import RequestState


class HostResidents:
    """Requests with a slot of the host tier; ``hidden`` as in ``RequestTable``."""

    def __init__(self, limits: SchedulerLimits, hidden: Set[RequestState] = frozenset()) -> None:
        self.is_up = limits.num_host_slots > 0
        """There is a host tier, and it works."""
        self.slots = HostSlots(limits.num_host_slots)
        self.queue = RequestQueue(hidden)
        """Requests with their KV on the host (not those that move)."""
        self.tokens = AwayTokens(self.slots, self.queue, num_layers=limits.num_layers, late_layers=limits.late_layers)
        """The token of each of them that is away."""

    def take_slot(self, state: RequestState) -> None:
        """Give a request a slot."""
        self.slots.take(state)

    def release_slot(self, state: RequestState) -> None:
        """Take a request's slot back; none of its tasks may be running."""
        self.tokens.forget(state)
        self.slots.release(state)

    def withdraw(self, state: RequestState) -> bool:
        """Take a resident that has ended out of the queues; return whether the host tier may still use its slot."""
        self.queue.remove(state)
        return self.tokens.withdraw(state)

    @property
    def has_some(self) -> bool:
        """A request holds a slot: its token may be away."""
        return self.slots.num_used > 0

    @property
    def is_busy(self) -> bool:
        """True while the host tier attends for a request."""
        return any(state.away is not None and not state.away.ready for state in self.slots.holders())

    @property
    def num_ready(self) -> list[int]:
        """Results that wait to join, by layer."""
        return [len(queue) for queue in self.tokens.ready]

    def expected(self, *, has_device_rows: bool) -> list[list[RequestState]]:
        """Return, by layer, the residents whose result is not there but is expected in time; the first sent first."""
        return self.tokens.expected(has_device_rows=has_device_rows)

    def num_joinable(self, expected: Sequence[Sequence[RequestState]]) -> list[int]:
        """Return how many results wait to join or are ``expected``, by layer."""
        return [ready + len(states) for ready, states in zip(self.num_ready, expected, strict=True)]

    @property
    def num_at_token_boundary(self) -> int:
        """Residents of which the next token may enter."""
        return sum(state.away is None for state in self.queue)

    def plan_joins(
        self, max_rows: int, seats: int, expected: Sequence[Sequence[RequestState]] | None = None
    ) -> list[PiggybackJoin]:
        """Pick results for this step, lowest layer first (3.3.6).

        Inside a layer those that wait come first, the oldest request first, then those that are ``expected``.
        """
        joins: list[PiggybackJoin] = []
        for layer, queue in enumerate(self.tokens.ready):
            states = itertools.chain(queue, expected[layer] if expected is not None else ())
            for state in itertools.islice(states, seats):
                if len(joins) >= max_rows:
                    return joins
                joins.append(self.join_of(state))
        return joins

    def join_of(self, state: RequestState) -> PiggybackJoin:
        """Return the join of a token that is away, without its drafts."""
        assert state.away is not None
        return PiggybackJoin(
            request_id=state.request_id,
            position=state.away.position,
            slot=state.slot,
            epoch=state.epoch,
            layer=state.away.layer,
            state_slot=state.state_slot,
            is_ready=state.away.ready,
        )

    def plan_entries(
        self, allocate: Callable[[RequestState], tuple[int, ...] | None], max_entries: int
    ) -> list[PiggybackEntry]:
        """Start the next token of residents that stand at a token boundary, oldest first.

        ``allocate`` returns a request's host blocks for its newest token, or None if the request cannot go on now.
        """
        entries: list[PiggybackEntry] = []
        for state in self.queue:
            if len(entries) >= max_entries:
                break
            if state.away is not None:
                continue
            blocks = allocate(state)
            if blocks is None:
                continue
            entries.append(
                PiggybackEntry(
                    request_id=state.request_id,
                    token_id=state.token_ids[-1],
                    position=state.num_tokens - 1,
                    slot=state.slot,
                    epoch=state.epoch,
                    block_ids=blocks,
                    state_slot=state.state_slot,
                    lora_slot=state.lora_slot,
                )
            )
        return entries

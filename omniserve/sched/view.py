"""RequestView: what a policy can see of the requests. Whatever changes them goes through the ``Batch`` of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Protocol

from omniserve.core.plan import PiggybackJoin
from omniserve.core.request import ServiceClass
from omniserve.kv.base import Tier
from omniserve.sched.fairness import Account
from omniserve.sched.memory import MemoryRules
from omniserve.sched.prefixes_on_host import Coming
from omniserve.sched.request_table import RequestTable
from omniserve.sched.state import LS, RequestState


class QueueView(Protocol):
    """A queue of requests, by class and then arrival, that can only be read; see ``RequestQueue``."""

    @property
    def first(self) -> RequestState | None: ...

    def __iter__(self) -> Iterator[RequestState]: ...

    def __reversed__(self) -> Iterator[RequestState]: ...

    def __contains__(self, state: object) -> bool: ...

    def __len__(self) -> int: ...

    def everyone(self) -> tuple[RequestState, ...]: ...

    def hidden(self) -> list[RequestState]: ...


class HostView(Protocol):
    """The requests with their KV on the host tier, and which of their results can join a step; see ``HostResidents``.

    ``Batch.plan_entries`` starts the next tokens of requests that stand at a token boundary.
    """

    @property
    def queue(self) -> QueueView: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def num_ready(self) -> list[int]: ...

    @property
    def num_at_token_boundary(self) -> int: ...

    def num_joinable(self, expected: Sequence[Sequence[RequestState]]) -> list[int]: ...

    def expected(self, *, has_device_rows: bool) -> list[list[RequestState]]: ...

    def plan_joins(
        self, max_rows: int, seats: int, expected: Sequence[Sequence[RequestState]] | None = None
    ) -> list[PiggybackJoin]: ...

    def join_of(self, state: RequestState) -> PiggybackJoin: ...


class RequestView:
    """The requests of a scheduler, the memory that they have, and what is expected of the host tier and of sources."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self.limits = requests.limits
        self.memory: MemoryRules = requests.memory
        """Blocks and places that are free, that requests have, and that are kept for LS requests."""
        self.host: HostView = requests.residents
        self.states: Mapping[str, RequestState] = requests.states
        """All requests that have not ended, by id."""
        self.waiting: Mapping[ServiceClass, QueueView] = requests.waiting
        self.device: Mapping[ServiceClass, QueueView] = requests.device
        self.loading: Iterable[RequestState] = requests.loads
        """Requests that wait for KV from a source."""
        self.hidden: Set[RequestState] = requests.hidden
        """Requests that the step which is planned cannot have: the queues count them and do not yield them."""
        self.pinned: Set[RequestState] = requests.pinned
        """Hidden requests that cannot give way, either."""

    # -- where requests are --------------------------------------------------------------------------------------

    @property
    def host_is_up(self) -> bool:
        """There is a host tier, and it has not failed."""
        return self._requests.residents.is_up

    @property
    def num_moving(self) -> int:
        """Number of requests that move between the tiers or are restored."""
        return len(self._requests.moves.under_way)

    @property
    def num_on_device(self) -> int:
        """Number of requests on the device, of both kinds."""
        return sum(map(len, self.device.values()))

    @property
    def num_preemptions(self) -> int:
        """Counter: requests that lost their memory to others."""
        return self._requests.counters["preemptions"]

    def is_only_ls(self, state: RequestState) -> bool:
        """Return whether there is no other LS request."""
        return not any(other.kind is LS and other is not state for other in self.states.values())

    def account_of_newcomer(self, service_class: str, tenant: str = "") -> Account:
        """Return the account that a request of a class and a tenant would have if it came now; nothing changes."""
        return self._requests.account_of_newcomer(service_class, tenant)

    def is_shared(self, kind: ServiceClass) -> bool:
        """Return whether several tenants have requests of a class of this kind that wait or are on the device."""
        accounts = {*self._requests.waiting[kind].accounts, *self._requests.device[kind].accounts}
        return len(accounts) > 1 and len(accounts) > len({account.of_class for account in accounts})

    def waiting_by_prefix(self) -> Iterator[RequestState]:
        """Yield the waiting BE request that comes next by prefix, until one stays in the queue; see ``PrefixQueue``."""
        return self._requests.waiting_be.by_prefix()

    # -- KV that is elsewhere ------------------------------------------------------------------------------------

    def coming(self, state: RequestState) -> Coming | None:
        """Return the KV that will be copied to the device for a new WAITING request; None: nothing."""
        requests = self._requests
        return requests.loads.coming(state) if requests.prefixes.is_on and requests.residents.is_up else None

    def expected_s(self, state: RequestState) -> float | None:
        """Return in how many seconds a new request's first token is predicted by way of a source; None: unknown."""
        return self._requests.loads.expected_s(state)

    def host_blocks_wanted(self) -> int:
        """Return how many host blocks are to be left free for KV that comes from a source."""
        return self._requests.loads.blocks_wanted()

    @property
    def keeps_evicted(self) -> bool:
        """A preempted request keeps what is left of its blocks."""
        return self._requests.keeps_evicted

    def num_kept_tokens(self, state: RequestState, tier: Tier) -> int:
        """Return how many first tokens of a WAITING request still have their KV on a tier."""
        return self._requests.kept.num_tokens(state, tier)

    def num_checkpointed(self, state: RequestState) -> int:
        """Return how many of a request's first blocks have a copy on the host."""
        return self._requests.checkpoints.num_blocks(state)

"""HostsOnNetwork: which CPU hosts on the network can be used, and which requests were on one that is lost.

Paper: omniserve 4 (distributed CPU attention).
"""

from __future__ import annotations

from collections.abc import Iterable

from omniserve.core.work import HostEvent, HostJoined, HostLost
from omniserve.kv.base import NetworkKV
from omniserve.sched.state import RequestState


class HostsOnNetwork:
    """Tells the KV manager of hosts that come and go."""

    def __init__(self, network: NetworkKV) -> None:
        self._network = network
        self._hosts: set[int] = set()
        self.has_lost = False
        """A request may have KV on a host that is lost."""

    def on_event(self, event: HostEvent) -> None:
        """Note that a host can be used, or is lost; other events are passed over."""
        if isinstance(event, HostJoined):
            self._hosts.add(event.host)
            self._network.add_host(event.host, event.num_blocks, event.num_threads)
        elif isinstance(event, HostLost) and event.host in self._hosts:  # else it was lost before it was ever used
            self._hosts.remove(event.host)
            self._network.lose_host(event.host)
            self.has_lost = True

    def is_lost(self, state: RequestState) -> bool:
        """Tell whether the KV of a request was on a host that is lost."""
        return self._network.is_lost(state.request_id)

    def is_youngest(self, state: RequestState, youngest_first: Iterable[RequestState]) -> bool:
        """Tell whether no request on the same host is younger than this one, which is among them."""
        host = self._network.host_of(state.request_id)
        return next(other for other in youngest_first if self._network.host_of(other.request_id) == host) is state

"""NetworkHosts: the CPU hosts on the network as an engine sees them: connects to them, again when one was lost.

Host h has the block ids from ``h * HOST_BLOCKS`` on, so plans, tables and moves say where a request is without a word
more. The engine's own tier takes rows and results as ever: a task whose blocks are elsewhere goes to that host's link
(``host_tier_link*.cpp``), a message for each layer and host with q, k and v, and comes back as an event of the same
queue. Each host has two connections, one for rows and one for blocks, so that no row waits behind a move. A frame has a
checksum, a task its slot, epoch, layer and position.

A host that is cut off, silent or wrong is lost as a whole: its tasks and moves fail, and its requests are recomputed
(``RequestTable._leave_lost_hosts``). No rank connects again before the scheduler knows that all ranks have lost it, so
no token goes to a session without its KV.

Paper: omniserve 4 (distributed CPU attention).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omniserve.core import link
from omniserve.core.config import CPU_HOST_SECRET_VARIABLE, HostsConfig
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.stats import CPUHostStats
from omniserve.core.version import __version__
from omniserve.core.work import HOST_BLOCKS, HostEvent, HostJoined, HostLost
from omniserve.host.tier import HostTier
from omniserve.remote import handshake
from omniserve.remote.handshake import Hello
from omniserve.remote.host_server import spec_to_plain

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_CLOSE_S = 1.0
"""A thread that waits longer for a silent host is left alone."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


@dataclass(frozen=True, slots=True)
class HostUser:
    """The rank of an engine that uses the hosts."""

    engine: str
    """The engine's, the same on all of its ranks and on no other engine."""
    rank: int = 0
    num_ranks: int = 1


class NetworkHosts:
    """Connects a host tier to hosts on the network, beside the steps.

    A host that does not answer, or is lost, is tried again and again, in a thread of its own; ``poll`` tells which have
    joined.

    The ranks of an engine each have connections of their own, and lose a host together: once ``poll`` has told that one
    is lost, it is tried again only after ``allow``, and ``drop`` gives it up here because another rank has lost it.

    Args:
        config: Where the hosts are.
        tier: This machine's host tier, which gets the connections.
        user: The rank whose tier it is; None: the engine has one.

    Raises:
        ValueError: A host refuses this engine for good, or a setting is wrong: the message says why.
        OSError: The file with the secret cannot be read.
    """

    def __init__(self, config: HostsConfig, tier: HostTier, *, user: HostUser | None = None) -> None:
        self._tier, self._timeout_s = tier, config.cpu_host_timeout_s
        user = user or HostUser(secrets.token_hex(16))
        self._is_led = user.num_ranks > 1
        self._addresses = [link.host_and_port(address) for address in config.cpu_hosts]
        assert config.cpu_host_secret_file is not None
        self._secret = link.read_secret(config.cpu_host_secret_file, CPU_HOST_SECRET_VARIABLE)
        setup = tier.setup
        self._caller = {
            "purpose": "rows",
            "engine": user.engine,
            "rank": user.rank,
            "num_ranks": user.num_ranks,
            "spec": spec_to_plain(tier.spec),
            "dtype": str(tier.dtype).removeprefix("torch."),
            "block_size": setup.block_size,
            "kv_dtype": setup.kv_dtype,
            "cache_dtype": setup.cache_dtype,
            "num_slots": setup.num_slots,
            "max_rows": setup.max_rows,
            "timeout_s": config.cpu_host_timeout_s,
        }
        self._lock = threading.Lock()
        self._new: list[HostEvent] = []  # what `poll` has not returned yet of joins and drops; needs the lock
        self._attempts = [0 for _ in self._addresses]
        """The number of each host's present attempt to connect; ``drop`` ends one. Needs the lock."""
        self._is_tried = [True for _ in self._addresses]
        """Per host: connected, or reconnecting on its own. Guarded by the lock."""
        self._sockets: dict[int, socket.socket] = {}
        """Second descriptors of one connection of each connected host, to shut it down. Guarded by the lock."""
        self._is_wanted = [threading.Event() for _ in self._addresses]
        self._is_closed = threading.Event()
        self._first = [threading.Event() for _ in self._addresses]
        self._refused: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=self._keep, args=(host,), name=f"host-keeper-{host}", daemon=True)
            for host in range(1, len(self._addresses) + 1)
        ]
        for wanted, thread in zip(self._is_wanted, self._threads, strict=True):
            wanted.set()
            thread.start()
        for first in self._first:
            first.wait()
        if self._refused:
            self.close()
            raise ValueError("; ".join(self._refused.values()))

    def name(self, host: int) -> str:
        """Return what a host is called in messages."""
        return "CPU host {}:{}".format(*self._addresses[host - 1])

    def poll(self, events: Sequence[HostEvent]) -> list[HostEvent]:
        """Return one event for each host that has joined, and the tier's. Never waits for a host."""
        with self._lock:
            joined, self._new = self._new, []
        for event in events:
            if isinstance(event, HostLost):
                logger.warning("%s is lost: %s", self.name(event.host), event.message)
                with self._lock:
                    self._is_tried[event.host - 1] = False
                    self._forget_socket(event.host)
                if not self._is_led:
                    self.allow(event.host)
        return [*joined, *events]

    def drop(self, host: int) -> None:
        """Give up a host, because another rank has lost it; ``poll`` tells ``HostLost`` once, unless it has done so."""
        with self._lock:
            if not self._is_tried[host - 1]:
                return
            if (connection := self._sockets.get(host)) is not None:
                with contextlib.suppress(OSError):  # it is closed
                    connection.shutdown(socket.SHUT_RDWR)  # the tier finds that out, and tells of it
                return
            self._attempts[host - 1] += 1
            self._is_tried[host - 1] = False
            self._new.append(HostLost(host=host, message="another rank has lost it"))

    def allow(self, host: int) -> None:
        """Try a lost host again: all ranks have lost it, and the scheduler knows that or is told before it plans."""
        with self._lock:
            self._is_tried[host - 1] = True
            self._is_wanted[host - 1].set()

    def _forget_socket(self, host: int) -> None:
        if (connection := self._sockets.pop(host, None)) is not None:
            connection.close()

    def stats(self) -> dict[str, CPUHostStats]:
        """Return what is known of each host, by its address."""
        known = {
            told.host: CPUHostStats(
                is_connected=not told.is_lost,
                times_lost=told.times_lost,
                tasks=told.tasks_sent,
                row_bytes=told.bytes_sent + told.bytes_received,
                moved_bytes=told.bytes_moved,
            )
            for told in self._tier.hosts()
        }
        return {
            "{}:{}".format(*address): known.get(host, CPUHostStats())
            for host, address in enumerate(self._addresses, start=1)
        }

    def close(self) -> None:
        """Try no host any more."""
        with self._lock:
            self._is_closed.set()  # a connection that is there after this is not used
        for wanted in self._is_wanted:
            wanted.set()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        for host in list(self._sockets):
            self._forget_socket(host)

    def _keep(self, host: int) -> None:
        """Connect to a host whenever that is wanted."""
        pause_s = _FIRST_PAUSE_S
        wanted, first = self._is_wanted[host - 1], self._first[host - 1]
        while True:
            # Set at the start, and by `allow` behind a loss: not before the scheduler gives up the lost session's KV.
            wanted.wait()
            wanted.clear()  # before is_closed is read, because `close` sets the one after the other
            if self._is_closed.is_set():
                return
            with self._lock:
                attempt = self._attempts[host - 1]
            try:
                self._connect(host, attempt)
            except PeerRefused as error:
                if not first.is_set():
                    self._refused[host] = str(error)
                logger.warning("%s", error)
            except (PeerLost, OSError) as error:
                if not first.is_set():
                    logger.warning("%s is left out until it answers: %s", self.name(host), error)
            else:
                pause_s = _FIRST_PAUSE_S
                first.set()
                continue
            first.set()
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with self._lock:
                if attempt == self._attempts[host - 1]:
                    wanted.set()

    def _connect(self, host: int, attempt: int) -> None:
        """Open both connections to a host, and give them to the tier.

        Raises:
            PeerRefused: It refuses this engine, or answers what no host does.
            PeerLost, OSError: As ``_ask``.
        """
        try:
            self._open(host, attempt)
        except (KeyError, TypeError, ValueError) as error:
            raise PeerRefused(f"{self.name(host)} answers what no host does: {error!r}") from error

    def _open(self, host: int, attempt: int) -> None:
        rows, welcome = self._ask(host, Hello(__version__, self._caller))
        try:
            session = welcome["session"]
            num_blocks, num_threads = min(int(welcome["num_blocks"]), HOST_BLOCKS), int(welcome["num_threads"])
            if num_blocks < 1 or num_threads < 1:
                raise ValueError(f"{num_blocks} blocks, {num_threads} threads")
            blocks, _ = self._ask(host, Hello(__version__, {"purpose": "blocks", "session": session}))
        except BaseException:
            rows.close()
            raise
        new = HostJoined(host=host, num_blocks=num_blocks, num_threads=num_threads)
        with self._lock:  # so that `poll` sees the join before it sees that the host was lost
            if attempt != self._attempts[host - 1] or self._is_closed.is_set():
                rows.close()
                blocks.close()
                raise PeerLost(f"{self.name(host)} is not wanted any more")
            self._sockets[host] = socket.socket(fileno=os.dup(rows.fileno()))
            self._tier.connect(host, rows.detach(), blocks.detach(), num_blocks, self._timeout_s)
            self._new.append(new)
        logger.info("%s has joined: %d blocks, %d threads", self.name(host), num_blocks, num_threads)

    def _ask(self, host: int, hello: Hello) -> tuple[link.Link, dict[str, Any]]:
        """Open a connection to a host, and return it with what the host tells of itself.

        Raises:
            PeerRefused: The host refuses this engine, or does not know the secret.
            PeerLost: It does not answer.
            OSError: No process listens there.
        """
        name = self.name(host)
        peer = link.connect(self._addresses[host - 1], self._secret, _CONNECT_S, name, handshake.JSON)
        try:
            timeout_s = max(self._timeout_s, _CONNECT_S)  # it makes its pool first
            return peer, handshake.introduce(peer, hello, timeout_s, refusal=f"{name} refuses this engine: ")
        except BaseException:
            peer.close()
            raise

"""NetworkHosts: the CPU hosts on the network as an engine sees them: connects to them, again when one was lost.

Paper: omniserve 4 (distributed CPU attention).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import torch

from omniserve import __version__
from omniserve.core import link
from omniserve.core.config import HostsConfig
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.plan import HOST_BLOCKS, HostEvent, HostEventKind
from omniserve.core.spec import ModelSpec
from omniserve.core.stats import CPUHostStats
from omniserve.host.server import spec_to_plain
from omniserve.host.tier import HostTier

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


class NetworkHosts:
    """Connects a host tier to hosts on the network, beside the steps.

    A host that does not answer, or is lost, is tried again and again, in a thread of its own; ``poll`` tells which have
    joined.

    Args:
        config: Where the hosts are.
        tier: This machine's host tier, which gets the connections.
        spec: The model's sizes.
        dtype: Of rows and results.
        block_size, kv_dtype, num_slots: Those of the tier.

    Raises:
        ValueError: A host refuses this engine for good, or a setting is wrong: the message says why.
        OSError: The file with the secret cannot be read.
    """

    def __init__(
        self, config: HostsConfig, tier: HostTier, *, spec: ModelSpec, dtype: torch.dtype, block_size: int,
        kv_dtype: str, num_slots: int,
    ) -> None:  # fmt: skip
        self._tier, self._timeout_s = tier, config.cpu_host_timeout_s
        self._addresses = [link.host_and_port(address) for address in config.cpu_hosts]
        assert config.cpu_host_secret_file is not None
        self._secret = link.read_secret(config.cpu_host_secret_file)
        self._hello = {
            "purpose": "rows", "version": __version__, "engine": secrets.token_hex(16), "spec": spec_to_plain(spec),
            "dtype": str(dtype).removeprefix("torch."), "block_size": block_size, "kv_dtype": kv_dtype,
            "num_slots": num_slots, "max_rows": tier.max_rows, "timeout_s": config.cpu_host_timeout_s,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._new: list[HostEvent] = []  # joins that `poll` has not returned yet; needs the lock
        self._told_of: set[int] = set()  # the hosts whose join was the last that `poll` returned of them
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
        """Return the tier's events, and one for each host that has joined. Never waits for a host.

        If a host has joined and was lost since the last call, there is no event of either.
        """
        with self._lock:
            joined = self._new
            self._new = []
        told: list[HostEvent] = []
        for event in events:
            if event.kind is HostEventKind.HOST_LOST:
                logger.warning("%s is lost: %s", self.name(event.host), event.message)
                self._is_wanted[event.host - 1].set()
                if event.host not in self._told_of:
                    joined.remove(next(new for new in joined if new.host == event.host))
                    continue
                self._told_of.remove(event.host)
            told.append(event)
        self._told_of.update(new.host for new in joined)
        return told + joined

    def stats(self) -> dict[str, CPUHostStats]:
        """Return what is known of each host, by its address."""
        known = {
            told.host: CPUHostStats(
                is_connected=not told.is_lost, times_lost=told.times_lost, tasks=told.tasks_sent,
                row_bytes=told.bytes_sent + told.bytes_received, moved_bytes=told.bytes_moved,
            )
            for told in self._tier.hosts()
        }  # fmt: skip
        return {
            "{}:{}".format(*address): known.get(host, CPUHostStats())
            for host, address in enumerate(self._addresses, start=1)
        }

    def close(self) -> None:
        """Try no host any more."""
        self._is_closed.set()
        for wanted in self._is_wanted:
            wanted.set()
        for thread in self._threads:
            thread.join()

    def _keep(self, host: int) -> None:
        """Connect to a host whenever that is wanted."""
        pause_s = _FIRST_PAUSE_S
        wanted, first = self._is_wanted[host - 1], self._first[host - 1]
        while True:
            # Set at the start, and by `poll` with a loss: only then does the scheduler give up the lost session's KV.
            wanted.wait()
            wanted.clear()  # before is_closed is read, because `close` sets the one after the other
            if self._is_closed.is_set():
                return
            try:
                self._connect(host)
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
            wanted.set()

    def _connect(self, host: int) -> None:
        """Open both connections to a host, and give them to the tier.

        Raises:
            PeerRefused: It refuses this engine, or answers what no host does.
            PeerLost, OSError: As ``_ask``.
        """
        try:
            self._open(host)
        except (KeyError, TypeError, ValueError) as error:
            raise PeerRefused(f"{self.name(host)} answers what no host does: {error!r}") from error

    def _open(self, host: int) -> None:
        rows, welcome = self._ask(host, self._hello)
        try:
            session = welcome["session"]
            num_blocks, num_threads = min(int(welcome["num_blocks"]), HOST_BLOCKS), int(welcome["num_threads"])
            if num_blocks < 1 or num_threads < 1:
                raise ValueError(f"{num_blocks} blocks, {num_threads} threads")
            blocks, _ = self._ask(host, {"purpose": "blocks", "session": session})
        except BaseException:
            rows.close()
            raise
        new = HostEvent(kind=HostEventKind.HOST_JOINED, host=host, num_blocks=num_blocks, num_threads=num_threads)
        with self._lock:  # so that `poll` sees the join before it sees that the host was lost
            self._tier.connect(host, rows.detach(), blocks.detach(), num_blocks, self._timeout_s)
            self._new.append(new)
        logger.info("%s has joined: %d blocks, %d threads", self.name(host), num_blocks, num_threads)

    def _ask(self, host: int, hello: dict[str, Any]) -> tuple[link.Link, dict[str, Any]]:
        """Open a connection to a host, and return it with the host's answer.

        Raises:
            PeerRefused: The host refuses this engine, or does not know the secret.
            PeerLost: It does not answer.
            OSError: Nobody listens there.
        """
        name = self.name(host)
        peer = link.connect(self._addresses[host - 1], self._secret, _CONNECT_S, name, link.JSON)
        try:
            peer.send(hello)
            # It makes its pool first.
            welcome = peer.receive(max(self._timeout_s, _CONNECT_S))
            if "refused" in welcome:
                kind = PeerLost if welcome.get("may_change") else PeerRefused
                raise kind(f"{name} refuses this engine: {welcome['refused']}")
        except BaseException:
            peer.close()
            raise
        return peer, welcome

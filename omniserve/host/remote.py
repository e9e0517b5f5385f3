"""NetworkHosts: the CPU hosts on the network as an engine sees them: connects to them, again when one was lost.

Paper: omniserve 4 (distributed CPU attention).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omniserve import __version__
from omniserve.core import link
from omniserve.core.config import HostsConfig
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.plan import HostEvent, HostEventKind
from omniserve.core.spec import ModelSpec
from omniserve.core.stats import CPUHostStats
from omniserve.host.server import spec_to_plain
from omniserve.host.tier import HostTier

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


@dataclass(frozen=True, slots=True)
class _Connected:
    host: int
    rows_fd: int
    blocks_fd: int
    num_blocks: int
    num_threads: int


class NetworkHosts:
    """Connects a host tier to hosts on the network, beside the steps.

    ``poll`` connects what has answered, and tells of it; a host that does not answer, or is lost, is tried again and
    again, in a thread of its own.

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
        self._answered: queue.SimpleQueue[_Connected] = queue.SimpleQueue()
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
        """Connect hosts that have answered; return an event for each. ``events`` are those of the tier. Never waits."""
        for event in events:
            if event.kind is HostEventKind.HOST_LOST and not self._is_closed.is_set():
                logger.warning("%s is lost: %s", self.name(event.host), event.message)
                self._is_wanted[event.host - 1].set()
        joined: list[HostEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                new = self._answered.get_nowait()
                self._tier.connect(new.host, new.rows_fd, new.blocks_fd, new.num_blocks, self._timeout_s)
                logger.info(
                    "%s has joined: %d blocks, %d threads", self.name(new.host), new.num_blocks, new.num_threads
                )
                joined.append(
                    HostEvent(
                        kind=HostEventKind.HOST_JOINED, host=new.host, num_blocks=new.num_blocks,
                        num_threads=new.num_threads,
                    )
                )  # fmt: skip
        return joined

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
        with contextlib.suppress(queue.Empty):
            while True:
                new = self._answered.get_nowait()
                os.close(new.rows_fd)
                os.close(new.blocks_fd)

    def _keep(self, host: int) -> None:
        """Connect to a host whenever it is wanted."""
        pause_s = _FIRST_PAUSE_S
        wanted, first = self._is_wanted[host - 1], self._first[host - 1]
        while True:
            wanted.wait()
            wanted.clear()  # before it looks: `close` sets it last
            if self._is_closed.is_set():
                return
            try:
                connected = self._connect(host)
            except PeerRefused as error:
                if not first.is_set():
                    self._refused[host] = str(error)
                logger.warning("%s", error)
            except (PeerLost, OSError) as error:
                if not first.is_set():
                    logger.warning("%s is left out until it answers: %s", self.name(host), error)
            else:
                self._answered.put(connected)
                pause_s = _FIRST_PAUSE_S
                first.set()
                continue
            first.set()
            wanted.set()
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connect(self, host: int) -> _Connected:
        rows, welcome = self._ask(host, self._hello)
        try:
            blocks, _ = self._ask(host, {"purpose": "blocks", "session": welcome["session"]})
        except BaseException:
            rows.close()
            raise
        return _Connected(host, rows.detach(), blocks.detach(), welcome["num_blocks"], welcome["num_threads"])

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

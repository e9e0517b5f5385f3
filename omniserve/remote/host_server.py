"""A CPU host on the network: keeps KV of an engine on another machine, and attends over it with this machine's threads.

``python -m omniserve.host`` runs one. It knows no model: the engine that connects tells the sizes, and the host makes a
host tier with them. It serves one engine at a time; when that is gone, its KV is dropped and the next one may come. An
engine of several ranks has a tier for each, with an equal part of the memory and of the threads.

Paper: omniserve 4 (distributed CPU attention).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from omniserve.core import link
from omniserve.core.errors import OmniServeError, PeerLost
from omniserve.core.setup import HostTierSetup
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.core.version import __version__
from omniserve.host.tier import HostTier
from omniserve.remote import handshake
from omniserve.remote.handshake import Hello, Welcome

logger = logging.getLogger(__name__)

_HELLO_S = 10.0
_SECOND_CONNECTION_S = 10.0
_LAST_SESSION_S = 2.0  # of an engine that has gone
_LOOK_S = 0.5
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def spec_to_plain(spec: ModelSpec) -> dict[str, Any]:
    """Return a model's sizes as JSON holds them."""
    return dataclasses.asdict(spec)


def spec_of_plain(plain: Mapping[str, Any]) -> ModelSpec:
    """Return the sizes that ``spec_to_plain`` made.

    Raises:
        TypeError: The sizes are of another version.
    """
    layers = []
    for layer in plain["attention"]:
        settings: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in layer.items()}
        layers.append(AttentionSpec(**settings))
    return ModelSpec(**{**plain, "attention": tuple(layers), "eos_token_ids": tuple(plain["eos_token_ids"])})


@dataclass(slots=True)
class _Session:
    """A rank of an engine that is served, or will be when its second connection has come."""

    engine: str
    rank: int
    token: str
    tier: HostTier
    timeout_s: float
    connections: list[socket.socket] = field(default_factory=list)
    """Second descriptors of both, for shutting them down; the tier closes the first ones."""
    descriptors: dict[str, int] = field(default_factory=dict)
    """Descriptors of the connections, by purpose."""
    is_whole: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def add(self, purpose: str, descriptor: int) -> None:
        """Take a connection."""
        self.connections.append(socket.socket(fileno=os.dup(descriptor)))
        self.descriptors[purpose] = descriptor


class HostServer:
    """Serves engines, one at a time, from ``start`` to ``close``.

    Args:
        secret: What an engine must know.
        kv_bytes: Memory for KV.
        num_threads: Threads that attend.
        cores: Cores that they are pinned to; None: not pinned.
        address: Where to listen; port 0: any.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        kv_bytes: int,
        num_threads: int,
        cores: tuple[int, ...] | None = None,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self._secret, self._kv_bytes, self._num_threads, self._cores = secret, kv_bytes, num_threads, cores
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """The address at which the server listens."""
        self._lock = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        """Sessions by rank, all of one engine. Guarded by the lock."""
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name="host-accept", daemon=True)

    def start(self) -> None:
        """Accept engines from now on, in threads."""
        self._acceptor.start()

    def wait(self) -> None:
        """Wait until it is closed."""
        # Again and again: a signal may come to another thread, and then does not wake this one, which must handle it.
        while self._acceptor.is_alive():
            self._acceptor.join(_LOOK_S)

    def close(self) -> None:
        """Accept no more connections, and end the session."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._acceptor.ident is not None:  # it was started
            self._acceptor.join()
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            self._end(session)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    logger.error("this host can accept no connection any more: %s", error)
                return
            name = f"{address[0]}:{address[1]}"
            threading.Thread(target=self._greet, args=(connection, name), name="host-greet", daemon=True).start()

    def _greet(self, connection: socket.socket, name: str) -> None:
        """Let a new connection prove itself, and do what it asks for."""
        try:
            peer = link.accept(connection, self._secret, name, handshake.JSON)
        except PeerLost as error:
            logger.warning("a connection is refused: %s", error)
            return
        try:
            try:
                hello = peer.receive(_HELLO_S)
                if not isinstance(hello, Hello):
                    raise ValueError(f"it sends {type(hello).__name__}")
                begin = {"rows": self._begin, "blocks": self._complete}[hello.caller["purpose"]]
                welcome, go_on = begin(peer, hello, name)
            except (KeyError, TypeError, ValueError, OmniServeError, RuntimeError, MemoryError) as error:
                if isinstance(error, PeerLost):
                    raise
                logger.warning("%s is refused: %s", name, error)
                handshake.refuse(peer, str(error), may_change=isinstance(error, OmniServeError))
                return
            peer.send(Welcome(welcome))
            go_on()
        except PeerLost as error:
            logger.warning("%s", error)
            peer.close()

    def _begin(self, peer: link.Link, hello: Hello, name: str) -> tuple[Any, Callable[[], None]]:
        """Make a session for an engine's first connection."""
        if hello.version != __version__:
            raise ValueError(f"this host runs OmniServe {__version__}, the engine {hello.version}")
        caller = hello.caller
        rank, num_ranks = int(caller["rank"]), int(caller["num_ranks"])
        if not 0 <= rank < num_ranks:
            raise ValueError(f"it is rank {rank} of {num_ranks}")
        with self._lock:
            before = list(self._sessions.values())
        for each in before:
            if each.engine == caller["engine"]:
                if each.rank == rank:
                    self._end(each)  # it has lost the host, and comes back
            elif each.thread is not None:
                each.thread.join(_LAST_SESSION_S)
        num_threads = max(1, self._num_threads // num_ranks)
        setup = HostTierSetup(
            block_size=caller["block_size"],
            kv_bytes=self._kv_bytes // num_ranks,
            kv_dtype=caller["kv_dtype"],
            cache_dtype=caller["cache_dtype"],
            num_slots=caller["num_slots"],
            max_rows=caller["max_rows"],
            num_threads=num_threads,
            cores=self._cores_of(rank, num_ranks),
        )
        tier = HostTier(setup, spec=spec_of_plain(caller["spec"]), dtype=_DTYPES[caller["dtype"]])
        session = _Session(caller["engine"], rank, secrets.token_hex(16), tier, float(caller["timeout_s"]))
        with self._lock:
            is_free = all(each.engine == session.engine for each in self._sessions.values())
            if not is_free or rank in self._sessions or self._is_closed:
                tier.close()
                raise OmniServeError("another engine uses this host")
            self._sessions[rank] = session
        # The session's thread ends the session, also if the engine never gets this answer. The thread sends nothing
        # before the second connection is there.
        session.add("rows", os.dup(peer.fileno()))
        session.thread = threading.Thread(target=self._serve, args=(session, name), name="host-serve", daemon=True)
        session.thread.start()
        welcome = {"session": session.token, "num_blocks": tier.num_blocks, "num_threads": num_threads}
        return welcome, lambda: os.close(peer.detach())

    def _cores_of(self, rank: int, num_ranks: int) -> tuple[int, ...] | None:
        """Return the cores to which a rank's threads are pinned: with fewer cores than ranks, all of them."""
        return self._cores and (self._cores[rank::num_ranks] or self._cores)

    def _complete(self, peer: link.Link, hello: Hello, name: str) -> tuple[Any, Callable[[], None]]:
        """Give a session its second connection."""
        with self._lock:
            sessions = list(self._sessions.values())
        session = next((each for each in sessions if secrets.compare_digest(each.token, hello.caller["session"])), None)
        if session is None or session.is_whole.is_set():
            raise OmniServeError("there is no such session")

        def go_on() -> None:
            with self._lock:
                if self._sessions.get(session.rank) is not session:
                    raise PeerLost("the session has ended")
                session.add("blocks", peer.detach())
            session.is_whole.set()

        return {"session": session.token}, go_on

    def _serve(self, session: _Session, name: str) -> None:
        why = "its second connection has not come"
        session.is_whole.wait(_SECOND_CONNECTION_S)
        with self._lock:
            is_whole = "blocks" in session.descriptors
            if not is_whole:
                self._forget(session)  # the second connection is refused from now on
        if is_whole:
            logger.info("serves the engine at %s with %d blocks", name, session.tier.num_blocks)
            descriptors = session.descriptors
            why = session.tier.serve(descriptors["rows"], descriptors["blocks"], session.timeout_s)
        else:
            os.close(session.descriptors["rows"])
        for connection in session.connections:
            connection.close()
        logger.info("serves the engine at %s no more: %s", name, why)
        session.tier.close()
        with self._lock:
            self._forget(session)

    def _forget(self, session: _Session) -> None:
        if self._sessions.get(session.rank) is session:
            del self._sessions[session.rank]

    def _end(self, session: _Session) -> None:
        """End a session, and wait for that."""
        for connection in session.connections:
            with contextlib.suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)
        session.is_whole.set()
        if session.thread is not None:
            session.thread.join()

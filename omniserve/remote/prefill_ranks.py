"""The part of ranks other than rank 0 in prefill engines: their share of the KV goes from rank to rank.

Rank 0 of an engine asks rank 0 of the prefill engine, and tells its other ranks where to connect. On either side a rank
has the same blocks as rank 0, with the KV of its own heads and layers.

Every rank sends its part to its counterpart. A prompt has come when all of it is here, and a prefill engine is lost as
a CPU host is (``parallel/host_tier.py``).

Paper: omniserve 5.4.4.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from omniserve.core import link
from omniserve.core.config import PREFILL_SECRET_VARIABLE, PrefillConfig
from omniserve.core.errors import PeerLost
from omniserve.core.version import __version__
from omniserve.core.work import CancelPrefill, HostEvent, PrefillEngineJoined, PrefillEngineLost, RemotePrefill
from omniserve.remote.handshake import Hello, Welcome, introduce, refuse
from omniserve.remote.prefill_engines import engine_name
from omniserve.remote.prefill_messages import AskingRank, Blocks, Failed, Finished
from omniserve.remote.prefill_receiver import Order, PrefillReceiver, Sender
from omniserve.remote.prefill_session import Listener, Session, bytes_of

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0


class RankReceiver(PrefillReceiver):
    """Takes a rank's part of the KV from ranks of prefill engines.

    Args:
        config: The engine's settings.
        rank: This one's.
        pool_LBK2SH: Its host tier's pool.
        fingerprint: ``kv_fingerprint`` of its part of the model.
        tell: Called from threads with each event.

    Raises:
        OSError, ValueError: The secret cannot be read.
    """

    def __init__(
        self,
        config: PrefillConfig,
        rank: int,
        pool_LBK2SH: Tensor,
        *,
        fingerprint: str,
        tell: Callable[[HostEvent], None],
    ) -> None:
        super().__init__(
            [f"rank {rank} of {engine_name(address)}" for address in config.prefill_engines],
            pool_LBK2SH,
            state_bytes=0,
            timeout_s=config.prefill_timeout_s,
            clock=lambda: 0.0,  # rank 0 takes the time
        )
        assert config.prefill_secret_file is not None
        self._secret = link.read_secret(config.prefill_secret_file, PREFILL_SECRET_VARIABLE)
        self._tell_rank_0, self._fingerprint = tell, fingerprint
        self._has_started = threading.Condition(self._lock)
        self._is_dropped = [False for _ in self._senders]
        self._threads: dict[int, threading.Thread] = {}
        """Threads of the last connections, by the engine's number."""

    def join(self, number: int, session: str, address: tuple[str, int]) -> None:
        """Connect to this rank's counterpart in a prefill engine that rank 0 has joined.

        ``PrefillEngineJoined`` tells when that is done, and ``PrefillEngineLost`` once when it is over.
        """
        self._is_dropped[number - 1] = self._is_closed.is_set()
        self._threads[number] = threading.Thread(
            target=self._serve,
            args=(self._senders[number - 1], session, address),
            name=f"prefill-{number}",
            daemon=True,
        )
        self._threads[number].start()

    def drop(self, number: int) -> None:
        """Give up a prefill engine, because another rank has lost it."""
        with self._has_started:
            self._is_dropped[number - 1] = True
            if (peer := self._senders[number - 1].link) is not None:
                peer.shut_down()
            self._has_started.notify_all()

    def cancel(self, cancel: CancelPrefill) -> None:
        """Do nothing: rank 0 tells the engine, whose ranks all end the prefill."""

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            self._is_closed.set()
            receiving = [self._threads[sender.number] for sender in self._senders if sender.link is not None]
        for sender in self._senders:
            self.drop(sender.number)
        for thread in receiving:  # one that still connects ends by itself, as its engine is marked as dropped
            thread.join()

    def _serve(self, sender: Sender, session: str, address: tuple[str, int]) -> None:
        try:
            peer = link.connect(address, self._secret, _CONNECT_S, sender.name)
        except (PeerLost, OSError) as error:
            self._give_up(sender, error)
            return
        try:
            asking = AskingRank(session, self._fingerprint, self._block_bytes)
            introduce(peer, Hello(__version__, asking), self._timeout_s)
            with self._lock:
                if self._is_dropped[sender.number - 1]:
                    raise PeerLost("another rank has lost it meanwhile")
                sender.link = peer
                self._tell(PrefillEngineJoined(sender.number))
        except PeerLost as error:
            self._give_up(sender, error)
        else:
            self._receive(sender, peer)
        finally:
            peer.close()

    def _give_up(self, sender: Sender, error: Exception) -> None:
        if not self._is_closed.is_set():
            logger.warning("%s cannot be used: %s", sender.name, error)
            self._tell(PrefillEngineLost(sender.number))

    def _order(self, sender: Sender, move_id: int) -> Order:
        """Return the order that a message is about; wait for it, as the step that begins it may come later here."""
        with self._has_started:
            self._has_started.wait_for(
                lambda: move_id in sender.orders or self._is_dropped[sender.number - 1], self._timeout_s
            )
        return super()._order(sender, move_id)

    def _on_start(self, sender: Sender, prefill: RemotePrefill) -> None:
        self._has_started.notify_all()

    def _tell(self, event: HostEvent) -> None:
        self._tell_rank_0(event)


class RankSender:
    """Sends a rank's part of the KV of prompts to ranks of engines, for a prefill engine.

    Args:
        pool_LBK2SH: The rank's host pool.
        fingerprint: ``kv_fingerprint`` of its part of the model.
        secret: What an engine must know.
        address: Where to listen; port 0: any.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, pool_LBK2SH: Tensor, *, fingerprint: str, secret: bytes, address: tuple[str, int]) -> None:
        self._pool_LBK2SH, self._fingerprint, self._secret = pool_LBK2SH, fingerprint, secret
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._listener = Listener(address, self._greet)
        self.address = self._listener.address
        """The address at which the rank listens."""

    def send(self, session: str, move_id: int, blocks: Sequence[int]) -> None:
        """Send the next blocks of a prompt."""
        self._send(session, Blocks(move_id, bytes_of(self._pool_LBK2SH, blocks)))

    def end(self, session: str, message: Finished | Failed) -> None:
        """Send how a prompt has ended."""
        self._send(session, message)

    def _send(self, session: str, message: object) -> None:
        with self._lock:
            peer = self._sessions.get(session)
        if peer is not None:  # else its engine has not come, or has gone
            peer.send(message)

    def end_session(self, session: str) -> None:
        """End the connection to an engine that rank 0 has lost."""
        with self._lock:
            peer = self._sessions.pop(session, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._listener.close()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            self.end_session(session)

    def _greet(self, connection: socket.socket, name: str) -> None:
        try:
            peer = link.accept(connection, self._secret, name)
            hello = peer.receive(_CONNECT_S)
            if (why := self._why_refused(hello)) is not None:
                refuse(peer, f"it refuses this rank: {why}")
                return
            with self._lock:
                peer.send(Welcome())  # with the lock, so that nothing is sent before it
                session_id = hello.caller.session
                session = self._sessions[session_id] = Session(peer, session_id, lambda session, message: None)
            session.start()
        except PeerLost as error:
            logger.warning("a connection is refused: %s", error)

    def _why_refused(self, hello: object) -> str | None:
        if not (isinstance(hello, Hello) and isinstance(hello.caller, AskingRank) and hello.version == __version__):
            return f"it expects a rank of an engine with OmniServe {__version__}"
        if (hello.caller.fingerprint, hello.caller.block_bytes) != (self._fingerprint, self._pool_LBK2SH[:, 0].nbytes):
            return "it has other weights in its part of the model"
        return None

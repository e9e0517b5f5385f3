"""PrefillEngines: the prefill engines as an engine sees them. Connects to them, and asks them.

Paper: omniserve 5.4.4.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from omniserve.core import link
from omniserve.core.config import PREFILL_SECRET_VARIABLE, ParallelConfig, PrefillConfig
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.link import Link
from omniserve.core.stats import PrefillEngineStats
from omniserve.core.version import __version__
from omniserve.core.work import CancelPrefill, HostEvent, PrefillEngineJoined, RemotePrefill
from omniserve.remote.handshake import Hello, introduce
from omniserve.remote.prefill_messages import Ask, AskingEngine, Cancel, OpenedSession
from omniserve.remote.prefill_receiver import PrefillReceiver, Sender

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_CLOSE_S = 1.0
"""A thread that waits longer for a silent engine is left alone."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


def engine_name(address: str) -> str:
    """Return what a prefill engine is called in messages."""
    return f"the prefill engine at {address}"


class PrefillEngines(PrefillReceiver):
    """Keeps connections to prefill engines, in a thread for each. One thread calls it.

    With several ranks this is rank 0's; the others take the KV of their part of the model from the engine's ranks
    (``prefill_ranks``). They lose an engine together: once this one has lost it, it connects again after ``allow``.

    Args:
        config: Where they are.
        pool_LBK2SH: The host tier's pool, into which blocks come.
        fingerprint: Fingerprint of the weights, and of how blocks are laid out.
        state_bytes: Bytes of a request's recurrent states.
        classes: Names of the classes of requests.
        parallel: The engine's ranks, and so those of each prefill engine.
        clock: The engine's.

    Raises:
        ValueError: One refuses this engine for good, or a setting is wrong: the message says why.
        OSError: The file with the secret cannot be read.
    """

    def __init__(
        self,
        config: PrefillConfig,
        pool_LBK2SH: Tensor,
        *,
        fingerprint: str,
        state_bytes: int,
        classes: Sequence[str],
        parallel: ParallelConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.prefill_secret_file is not None
        super().__init__(
            [engine_name(address) for address in config.prefill_engines],
            pool_LBK2SH,
            state_bytes=state_bytes,
            timeout_s=config.prefill_timeout_s,
            clock=clock,
        )
        self._secret = link.read_secret(config.prefill_secret_file, PREFILL_SECRET_VARIABLE)
        sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self._is_led = parallel.num_ranks > 1
        asking = AskingEngine(fingerprint, self._block_bytes, tuple(classes), state_bytes, sizes)
        self._hello = Hello(__version__, asking)
        self._addresses = [link.host_and_port(address) for address in config.prefill_engines]
        self._welcomes: dict[int, OpenedSession] = {}
        self._events: list[HostEvent] = []
        self._has_news = threading.Event()
        self._refused: str | None = None
        self._first = [threading.Event() for _ in self._senders]
        self._is_allowed = [threading.Event() for _ in self._senders]
        self._threads = [
            threading.Thread(target=self._keep, args=(each,), name=f"prefill-{each.number}", daemon=True)
            for each in self._senders
        ]
        for thread in self._threads:
            thread.start()
        for first in self._first:
            first.wait()
        if self._refused is not None:
            self.close()
            raise ValueError(self._refused)

    # -- called by the engine ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while something that was asked for has not ended."""
        return any(each.orders for each in self._senders) or bool(self._events)

    def cancel(self, cancel: CancelPrefill) -> None:
        """Tell the engine to stop a prefill whose request has ended; its event is still returned by ``poll``."""
        with self._lock:
            for sender in self._senders:
                if cancel.move_id in sender.orders:
                    sender.outbox.put(Cancel(cancel.move_id))

    def poll(self) -> list[HostEvent]:
        """Return what has happened since the last call. Never blocks."""
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
            self._has_news.clear()
        return events

    def wait(self, timeout_s: float) -> None:
        """Sleep until ``poll`` has something to return or the time is over."""
        self._has_news.wait(timeout_s)

    def welcome(self, number: int) -> OpenedSession:
        """Return what an engine has said as this one joined it, the last time."""
        return self._welcomes[number]

    def drop(self, number: int) -> None:
        """Give up an engine, because another rank has lost it."""
        with self._lock:
            if (peer := self._senders[number - 1].link) is not None:
                peer.shut_down()

    def allow(self, number: int) -> None:
        """Connect to a lost engine again: all ranks have lost it, and the scheduler knows that."""
        self._is_allowed[number - 1].set()

    def stats(self) -> dict[str, PrefillEngineStats]:
        """Return what there is to tell of each engine, by its address."""
        return {
            "{}:{}".format(*address): PrefillEngineStats(
                is_connected=each.link is not None,
                times_lost=each.times_lost,
                prompts=each.num_asked,
                failed=each.num_failed,
            )
            for address, each in zip(self._addresses, self._senders, strict=True)
        }

    def close(self) -> None:
        """End the connections. A second call does nothing."""
        with self._lock:
            self._is_closed.set()  # a connection that is there after this is not used
            for allowed in self._is_allowed:
                allowed.set()
            is_used = [sender.link is not None for sender in self._senders]
            for sender in self._senders:
                if sender.link is not None:
                    sender.link.shut_down()
        for thread, used in zip(self._threads, is_used, strict=True):
            thread.join(None if used else _CLOSE_S)

    # -- the thread of an engine ---------------------------------------------------------------------------------

    def _keep(self, engine: Sender) -> None:
        """Connect to an engine, take what it sends, and connect again when it is lost."""
        try:
            self._keep_on(engine, self._first[engine.number - 1])
        except Exception as error:  # a defect: the engine at least goes on without this one
            logger.exception("%s is given up", engine.name)
            self._refused = f"{engine.name}: {type(error).__name__}: {error}"
        finally:
            self._first[engine.number - 1].set()

    def _keep_on(self, engine: Sender, first: threading.Event) -> None:
        pause_s, allowed = _FIRST_PAUSE_S, self._is_allowed[engine.number - 1]
        while not self._is_closed.is_set():
            try:
                peer = self._connect(engine)
            except PeerRefused as error:
                if not first.is_set():
                    self._refused = str(error)
                    first.set()
                    return
                logger.warning("%s", error)
            except (OSError, PeerLost) as error:
                level = logging.DEBUG if first.is_set() else logging.WARNING
                logger.log(level, "%s does not answer, and is left out until it does: %s", engine.name, error)
            else:
                logger.info("%s has joined", engine.name)
                first.set()
                num_asked = engine.num_asked
                self._serve(engine, peer)
                if not self._is_led or engine.num_asked > num_asked:  # else another rank may be unable to connect
                    pause_s = _FIRST_PAUSE_S
                if self._is_led:
                    allowed.wait()
            first.set()
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connect(self, engine: Sender) -> Link:
        address = self._addresses[engine.number - 1]
        peer = link.connect(address, self._secret, _CONNECT_S, engine.name)
        try:
            opened = introduce(peer, self._hello, self._timeout_s, refusal=f"{engine.name} refuses this engine: ")
        except PeerLost:
            peer.close()
            raise
        with self._lock:
            if self._is_closed.is_set():
                peer.close()
                raise PeerLost("it is not wanted any more")
            self._is_allowed[engine.number - 1].clear()
            self._welcomes[engine.number] = opened
            engine.link, engine.last_end_s, engine.outbox = peer, self._clock(), queue.SimpleQueue()
            self._tell(PrefillEngineJoined(engine.number))
        return peer

    def _send(self, outbox: queue.SimpleQueue[object], peer: Link) -> None:
        """Send what there is, in a thread: a step waits for no connection."""
        with contextlib.suppress(PeerLost):  # the other thread finds that out, too
            while (message := outbox.get()) is not None:
                peer.send(message)

    def _serve(self, engine: Sender, peer: Link) -> None:
        outbox = engine.outbox
        sender = threading.Thread(target=self._send, args=(outbox, peer), name="prefill-send", daemon=True)
        sender.start()
        try:
            self._receive(engine, peer)
        finally:
            outbox.put(None)
            peer.shut_down()  # or the other thread might be sending for ever
            sender.join()
            peer.close()

    def _on_start(self, sender: Sender, prefill: RemotePrefill) -> None:
        sender.outbox.put(Ask(prefill))

    def _tell(self, event: HostEvent) -> None:
        self._events.append(event)
        self._has_news.set()

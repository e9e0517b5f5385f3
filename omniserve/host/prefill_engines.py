"""PrefillEngines: the prefill engines as an engine sees them. Connects to them, asks them, and takes KV from them.

Paper: omniserve 5.4.4.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from omniserve.core import link
from omniserve.core.config import PrefillConfig
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.link import Link
from omniserve.core.plan import HostEvent, HostEventKind, RemotePrefill
from omniserve.core.stats import PrefillEngineStats
from omniserve.host.prefill_messages import Alive, Ask, Blocks, Cancel, Done, Failed, Hello, Refused, Welcome

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


@dataclass(slots=True)
class _Order:
    prefill: RemotePrefill
    began_s: float
    num_blocks: int = 0
    """Blocks that have come."""


@dataclass(slots=True)
class _Engine:
    """A prefill engine; needs the lock, but for what its own thread alone uses."""

    number: int
    address: tuple[str, int]
    link: Link | None = None
    outbox: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue)
    """What is to be sent; a new one for each connection, as None ends it."""
    orders: dict[int, _Order] = field(default_factory=dict)
    last_end_s: float = 0.0
    num_asked: int = 0
    num_failed: int = 0
    times_lost: int = 0

    @property
    def name(self) -> str:
        return "the prefill engine at {}:{}".format(*self.address)


class PrefillEngines:
    """Keeps connections to prefill engines, in a thread for each. One thread calls it.

    Every ``RemotePrefill`` that is started yields exactly one PREFILL_DONE or PREFILL_FAILED.

    Args:
        config: Where they are.
        pool_LBK2SH: The host tier's pool, into which blocks come.
        fingerprint: Of the weights, and of how blocks are laid out.
        state_bytes: Of a request's recurrent states.
        classes: Names of the classes of requests.
        clock: The engine's.

    Raises:
        ValueError: One refuses this engine for good, or a setting is wrong: the message says why.
        OSError: The file with the secret cannot be read.
    """

    def __init__(
        self, config: PrefillConfig, pool_LBK2SH: Tensor, *, fingerprint: str, state_bytes: int,
        classes: Sequence[str], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        assert config.prefill_secret_file is not None
        self._secret, self._timeout_s = link.read_secret(config.prefill_secret_file), config.prefill_timeout_s
        self._pool_LBK2SH, self._clock = pool_LBK2SH, clock
        self._block_bytes = pool_LBK2SH[:, 0].nbytes
        self._hello = Hello(fingerprint, self._block_bytes, tuple(classes), state_bytes)
        self._engines = [
            _Engine(number, link.host_and_port(address)) for number, address in enumerate(config.prefill_engines, 1)
        ]
        self._lock = threading.Lock()
        self._events: list[HostEvent] = []
        self._has_news = threading.Event()
        self._refused: str | None = None
        self._is_closed = threading.Event()
        self._first = [threading.Event() for _ in self._engines]
        self._threads = [
            threading.Thread(target=self._keep, args=(each,), name=f"prefill-{each.number}", daemon=True)
            for each in self._engines
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
        return any(each.orders for each in self._engines) or bool(self._events)

    def start(self, prefill: RemotePrefill) -> None:
        """Ask an engine. Its host blocks are not used otherwise until the event."""
        engine = self._engines[prefill.engine - 1]
        with self._lock:
            if engine.link is None:
                self._tell(HostEvent(kind=HostEventKind.PREFILL_FAILED, move_id=prefill.move_id))
                return
            engine.orders[prefill.move_id] = _Order(prefill, self._clock())
            engine.num_asked += 1
            engine.outbox.put(Ask(prefill))

    def cancel(self, move_id: int) -> None:
        """Tell the engine to stop a prefill whose request has ended; its event is still returned by ``poll``."""
        with self._lock:
            for engine in self._engines:
                if move_id in engine.orders:
                    engine.outbox.put(Cancel(move_id))

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

    def stats(self) -> dict[str, PrefillEngineStats]:
        """Return what there is to tell of each engine, by its address."""
        return {
            "{}:{}".format(*each.address): PrefillEngineStats(
                is_connected=each.link is not None, times_lost=each.times_lost, prompts=each.num_asked,
                failed=each.num_failed,
            )
            for each in self._engines
        }  # fmt: skip

    def close(self) -> None:
        """End the connections. A second call does nothing."""
        self._is_closed.set()
        with self._lock:
            for engine in self._engines:
                if engine.link is not None:
                    engine.link.shut_down()
        for thread in self._threads:
            thread.join()

    # -- the thread of an engine ---------------------------------------------------------------------------------

    def _keep(self, engine: _Engine) -> None:
        """Connect to an engine, take what it sends, and connect again when it is lost."""
        try:
            self._keep_on(engine, self._first[engine.number - 1])
        except Exception as error:  # a defect: the engine at least goes on without this one
            logger.exception("%s is given up", engine.name)
            self._refused = f"{engine.name}: {type(error).__name__}: {error}"
        finally:
            self._first[engine.number - 1].set()

    def _keep_on(self, engine: _Engine, first: threading.Event) -> None:
        pause_s = _FIRST_PAUSE_S
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
                pause_s = _FIRST_PAUSE_S
                logger.info("%s has joined", engine.name)
                first.set()
                self._serve(engine, peer)
            first.set()
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connect(self, engine: _Engine) -> Link:
        peer = link.connect(engine.address, self._secret, _CONNECT_S, engine.name)
        try:
            peer.send(self._hello)
            answer = peer.receive(self._timeout_s)
        except PeerLost:
            peer.close()
            raise
        if not isinstance(answer, Welcome):
            peer.close()
            why = answer.why if isinstance(answer, Refused) else f"it answers {type(answer).__name__}"
            raise PeerRefused(f"{engine.name} refuses this engine: {why}")
        with self._lock:
            engine.link, engine.last_end_s, engine.outbox = peer, self._clock(), queue.SimpleQueue()
            self._tell(HostEvent(kind=HostEventKind.PREFILL_JOINED, host=engine.number))
        return peer

    def _send(self, outbox: queue.SimpleQueue[object], peer: Link) -> None:
        """Send what there is, in a thread: a step waits for no connection."""
        with contextlib.suppress(PeerLost):  # the other thread finds that out, too
            while (message := outbox.get()) is not None:
                peer.send(message)

    def _serve(self, engine: _Engine, peer: Link) -> None:
        outbox = engine.outbox
        sender = threading.Thread(target=self._send, args=(outbox, peer), name="prefill-send", daemon=True)
        sender.start()
        try:
            while not self._is_closed.is_set():
                self._take(engine, peer.receive(self._timeout_s))
        except Exception as error:  # whatever it sends: it is not to be trusted any more
            if not self._is_closed.is_set():
                what = error if isinstance(error, (PeerLost, ValueError)) else f"{type(error).__name__}: {error}"
                logger.warning("%s is lost: %s", engine.name, what)
        finally:
            with self._lock:
                engine.link = None
                engine.times_lost += 1
                orders, engine.orders = engine.orders, {}
                self._tell(HostEvent(kind=HostEventKind.PREFILL_LOST, host=engine.number))
                for order in orders.values():
                    self._end(order, HostEventKind.PREFILL_FAILED, 0.0, self._clock())
            outbox.put(None)
            peer.shut_down()  # or the other thread might be sending for ever
            sender.join()
            peer.close()

    def _take(self, engine: _Engine, message: object) -> None:
        match message:
            case Alive():
                pass
            case Blocks(move_id, data):
                self._put(engine.orders[move_id], data)
            case Done(move_id) | Failed(move_id):
                states = message.states if isinstance(message, Done) else None
                if isinstance(message, Failed) and message.why:
                    logger.info("%s: %s", engine.name, message.why)
                if isinstance(message, Done) and len(states or b"") != self._hello.state_bytes:
                    raise ValueError(f"it sends {len(states or b'')} bytes of recurrent states")
                with self._lock:
                    order = engine.orders.pop(move_id)
                    now_s = self._clock()
                    seconds = now_s - max(order.began_s, engine.last_end_s)
                    engine.last_end_s = now_s
                    whole = order.num_blocks == len(order.prefill.host_block_ids)
                    is_done = isinstance(message, Done) and whole
                    kind = HostEventKind.PREFILL_DONE if is_done else HostEventKind.PREFILL_FAILED
                    self._end(order, kind, seconds, now_s, states)
            case _:
                raise ValueError(f"it sends {type(message).__name__}")

    def _put(self, order: _Order, data: bytes) -> None:
        """Write blocks to the pool."""
        count, rest = divmod(len(data), self._block_bytes)
        ids = order.prefill.host_block_ids[order.num_blocks : order.num_blocks + count]
        if rest or not count or len(ids) < count:
            raise ValueError(f"it sends {len(data)} bytes of blocks, which is not what was asked for")
        pool = self._pool_LBK2SH
        blocks = torch.frombuffer(bytearray(data), dtype=pool.dtype).view(count, pool.shape[0], *pool.shape[2:])
        pool[:, list(ids)] = blocks.transpose(0, 1)
        order.num_blocks += count

    def _tell(self, event: HostEvent) -> None:
        self._events.append(event)
        self._has_news.set()

    def _end(
        self, order: _Order, kind: HostEventKind, seconds: float, at_s: float, states: bytes | None = None
    ) -> None:  # fmt: skip
        self._engines[order.prefill.engine - 1].num_failed += kind is HostEventKind.PREFILL_FAILED
        self._tell(HostEvent(
            kind=kind, move_id=order.prefill.move_id, num_blocks=order.num_blocks, seconds=seconds, at_s=at_s,
            host=order.prefill.engine, states=states,
        ))  # fmt: skip

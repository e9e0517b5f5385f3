"""PrefillReceiver: takes KV from prefill engines, and writes it into the host tier's pool.

Paper: omniserve 5.4.4.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from omniserve.core.errors import PeerLost
from omniserve.core.link import Link
from omniserve.core.work import CancelPrefill, Done, HostEvent, PrefilledKV, PrefillEngineLost, RemotePrefill
from omniserve.remote.prefill_messages import Alive, Blocks, Failed, Finished

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Order:
    """A prefill that was asked for."""

    prefill: RemotePrefill
    began_s: float
    num_blocks: int = 0
    """Blocks that have come."""


@dataclass(slots=True)
class Sender:
    """A prefill engine, or the one of its ranks that has the same part of the model; needs the lock."""

    number: int
    name: str
    link: Link | None = None
    outbox: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue)
    """Messages to send to the engine; a new queue for each connection, as None ends it."""
    orders: dict[int, Order] = field(default_factory=dict)
    last_end_s: float = 0.0
    num_asked: int = 0
    num_failed: int = 0
    times_lost: int = 0


class PrefillReceiver:
    """Takes what prefill engines send, each in a thread of its own.

    Every ``RemotePrefill`` that is started yields exactly one ``Done``.

    Args:
        names: What the engines are called in messages, in the order of their numbers, which begin at 1.
        pool_LBK2SH: The host tier's pool, into which blocks come.
        state_bytes: Bytes of a request's recurrent states.
        timeout_s: Seconds of silence after which an engine is lost.
        clock: The engine's.
    """

    def __init__(
        self,
        names: Sequence[str],
        pool_LBK2SH: Tensor,
        *,
        state_bytes: int,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._pool_LBK2SH, self._state_bytes, self._timeout_s = pool_LBK2SH, state_bytes, timeout_s
        self._clock = clock
        self._block_bytes = pool_LBK2SH[:, 0].nbytes
        self._senders = [Sender(number, name) for number, name in enumerate(names, 1)]
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    def start(self, prefill: RemotePrefill) -> None:
        """Expect the KV of a prompt. Its host blocks are not used otherwise until the event."""
        sender = self._senders[prefill.engine - 1]
        with self._lock:
            if sender.link is None:
                self._tell(
                    Done(move_id=prefill.move_id, ok=False, prefilled=PrefilledKV(num_blocks=0, at_s=self._clock()))
                )
                return
            sender.orders[prefill.move_id] = Order(prefill, self._clock())
            sender.num_asked += 1
            self._on_start(sender, prefill)

    def cancel(self, cancel: CancelPrefill) -> None:
        """End a prefill whose request has ended; its event comes all the same."""
        raise NotImplementedError

    def poll(self) -> list[HostEvent]:
        """Return what has happened since the last call, but for events that are told as they happen. Never blocks."""
        return []

    def _on_start(self, sender: Sender, prefill: RemotePrefill) -> None:
        """Do what else there is to do as an order is started; with the lock."""
        raise NotImplementedError

    def _tell(self, event: HostEvent) -> None:
        """Report an event; with the lock."""
        raise NotImplementedError

    def _order(self, sender: Sender, move_id: int) -> Order:
        """Return the order that a message is about.

        Raises:
            ValueError: There is none.
        """
        if (order := sender.orders.get(move_id)) is None:
            raise ValueError("it sends what was not asked for")
        return order

    def _receive(self, sender: Sender, peer: Link) -> None:
        """Take what an engine sends until it is lost; then all that it was asked for has failed."""
        try:
            while not self._is_closed.is_set():
                self._take(sender, peer.receive(self._timeout_s))
        except Exception as error:  # whatever it sends: it is not to be trusted any more
            if not self._is_closed.is_set():
                what = error if isinstance(error, (PeerLost, ValueError)) else f"{type(error).__name__}: {error}"
                logger.warning("%s is lost: %s", sender.name, what)
        finally:
            with self._lock:
                sender.link = None
                sender.times_lost += 1
                orders, sender.orders = sender.orders, {}
                self._tell(PrefillEngineLost(sender.number))
                for order in orders.values():
                    self._end(sender, order, 0.0, self._clock(), ok=False)

    def _take(self, sender: Sender, message: object) -> None:
        match message:
            case Alive():
                pass
            case Blocks(move_id, data):
                self._put(self._order(sender, move_id), data)
            case Finished(move_id) | Failed(move_id):
                states = message.states if isinstance(message, Finished) else None
                if isinstance(message, Failed) and message.why:
                    logger.info("%s: %s", sender.name, message.why)
                if isinstance(message, Finished) and len(states or b"") != self._state_bytes:
                    raise ValueError(f"it sends {len(states or b'')} bytes of recurrent states")
                order = self._order(sender, move_id)
                with self._lock:
                    del sender.orders[move_id]
                    now_s = self._clock()
                    seconds = now_s - max(order.began_s, sender.last_end_s)
                    sender.last_end_s = now_s
                    whole = order.num_blocks == len(order.prefill.host_block_ids)
                    self._end(sender, order, seconds, now_s, states, ok=isinstance(message, Finished) and whole)
            case _:
                raise ValueError(f"it sends {type(message).__name__}")

    def _put(self, order: Order, data: bytes) -> None:
        """Write blocks to the pool."""
        count, rest = divmod(len(data), self._block_bytes)
        ids = order.prefill.host_block_ids[order.num_blocks : order.num_blocks + count]
        if rest or not count or len(ids) < count:
            raise ValueError(f"it sends {len(data)} bytes of blocks, which is not what was asked for")
        pool = self._pool_LBK2SH
        blocks = torch.frombuffer(bytearray(data), dtype=pool.dtype).view(count, pool.shape[0], *pool.shape[2:])
        pool[:, list(ids)] = blocks.transpose(0, 1)
        order.num_blocks += count

    def _end(
        self, sender: Sender, order: Order, seconds: float, at_s: float, states: bytes | None = None, *, ok: bool
    ) -> None:
        sender.num_failed += not ok
        prefilled = PrefilledKV(num_blocks=order.num_blocks, at_s=at_s, states=states)
        self._tell(Done(move_id=order.prefill.move_id, ok=ok, seconds=seconds, prefilled=prefilled))

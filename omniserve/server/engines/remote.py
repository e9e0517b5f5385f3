"""An engine on another machine, as the API process reaches it: one connection, which is made again when it is cut.

What ``omniserve engine`` runs there is in ``agent.py``. A connection is a session: when it is lost, at either end, all
that belonged to it is over. So no message of an old one is taken for one of a new one.
"""

from __future__ import annotations

import uuid

import zmq
from zmq.utils.monitor import recv_monitor_message

from omniserve.core.version import __version__
from omniserve.server.engines import messages as engine_messages
from omniserve.server.engines.curve import CurveKeys
from omniserve.server.engines.peer import Peer

_CONNECT_MS = 5000
# What is sent last has so long to leave where a connection stands.
_LINGER_MS = 500
_EVENTS_OF_AN_END = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REASONS: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection to it was cut",
    zmq.EVENT_CLOSED: "nothing answers there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the connection to it was cut before the ends knew each other",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this server's key: give both ends files of the same folder",
}
_UNKNOWN_REASON = "no connection could be made: one end has keys and the other none, or they have different ones"


class RemotePeer:
    """A connection to an engine on another machine; see ``Peer``.

    Args:
        address: ``tcp://HOST:PORT``.
        keys: Of this end; None: nothing is encrypted.
        server_id: Tells the engine that a new session is of the same server as an old one.
    """

    has_own_clock = True

    def __init__(self, address: str, keys: CurveKeys | None, server_id: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),  # what was under way would be lost without a word
            (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
            (zmq.HANDSHAKE_IVL, _CONNECT_MS),
            (zmq.IPV6, 1),
        ):
            self._socket.setsockopt(option, value)
        if keys is not None:
            keys.put_on(self._socket, listens=False)
        self._monitor = self._socket.get_monitor_socket(_EVENTS_OF_AN_END)
        self._end: int | None = None
        self._has_answered = False
        self._socket.connect(address)
        self.reports_fd = int(self._socket.getsockopt(zmq.FD))
        self.death_fd = int(self._monitor.getsockopt(zmq.FD))
        self.send(engine_messages.encode(engine_messages.Hello(__version__, server_id)))

    def receive(self) -> bytes:
        data = self._socket.recv(zmq.NOBLOCK)
        self._has_answered = True
        return data

    def send(self, data: bytes) -> None:
        self._socket.send(data, zmq.NOBLOCK)

    @property
    def is_alive(self) -> bool:
        while self._end is None and self._monitor.poll(0):
            self._end = recv_monitor_message(self._monitor)["event"]
        return self._end is None

    def end_of(self) -> str:
        return _UNKNOWN_REASON if self._end is None else _REASONS.get(self._end, _UNKNOWN_REASON)

    def kill(self) -> None:
        if self.is_alive:
            self.send(engine_messages.encode(engine_messages.Kill()))

    async def end(self, *, is_ready: bool, has_stopped: bool) -> None:
        if self.is_alive:
            self.send(engine_messages.encode(engine_messages.Leave()))

    def close(self) -> None:
        # Without a connection nothing can leave, and waiting for it would stop this process.
        linger_ms = _LINGER_MS if self._has_answered and self.is_alive else 0
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()


class RemoteSource:
    """An engine that was started on another machine; see ``EngineSource``."""

    is_local = False

    def __init__(self, address: str, keys: CurveKeys | None) -> None:
        self.name, self._keys, self._server_id = address, keys, uuid.uuid4().hex

    async def connect(self) -> Peer:
        return RemotePeer(self.name, self._keys, self._server_id)

    async def end(self) -> None:
        pass

"""What an API worker has in the place of the engines and of the keys' rates, which its owner keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from omniserve.core.errors import EngineStopped
from omniserve.core.logs import request_id as http_request_id
from omniserve.core.request import Request, RequestOutput
from omniserve.routing.books import Call
from omniserve.server.access.keys import ApiKey
from omniserve.server.access.limits import Caller
from omniserve.server.engines.client import Accepted, Listener
from omniserve.server.engines.messages import Abort, Refused, Step
from omniserve.server.errors import ApiError, engine_gone
from omniserve.server.workers.messages import Admit, Admitted, Begin, Denied, Gone, State, UseTokens, encode

Send = Callable[[bytes], object]


class RemoteFleet:
    """The owner's engines, with what ``Service`` and ``OutputStream`` use of a ``Fleet``.

    Args:
        send: Sends a message to the owner.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.listeners: dict[str, Listener] = {}
        self.state = State(None, None, {})
        """As the owner told it last."""

    def check_room(self) -> None:
        """Raise ApiError unless an engine takes requests; whether too much waits for them, the owner looks itself."""
        if self.state.failure is not None:
            back_s = self.state.back_s
            raise engine_gone(self.state.failure, None if back_s is None else max(1.0, back_s - time.monotonic()))

    def place(self, call: Call, *, lora: str | None = None) -> RemotePlacement:
        """Return the way of a call's requests to the owner, which places them, by their adapter, too.

        Raises:
            ApiError: No engine takes requests.
        """
        self.check_room()
        return RemotePlacement(self, call)

    def begin(self, call: Call, requests: Sequence[Request], arrival_s: float) -> None:
        """Send the requests of a call."""
        self._send(
            encode(
                Begin(
                    list(requests),
                    arrival_s,
                    http_request_id.get(),
                    call.kind,
                    call.num_samples,
                    call.ttft_s,
                    call.salt,
                )
            )
        )

    def abort(self, request_id: str) -> None:
        """End a request; nothing more is heard of it. Unknown and finished ones are ignored."""
        if self.listeners.pop(request_id, None) is not None:
            self._send(encode(Abort(request_id)))

    def take(self, message: Step | Refused | Denied | Gone) -> None:
        """Hand out what the owner told of requests."""
        match message:
            case Step(accepted, outputs):
                for request_id, predicted_ttft_s, scaled_slo in accepted:
                    self._deliver(request_id, Accepted(predicted_ttft_s, scaled_slo))
                for output in outputs:
                    if not isinstance(output, tuple):
                        self._deliver(output.request_id, output)
                    elif (listener := self.listeners.get(output[0])) is not None:
                        listener(output)
            case Refused(request_id) | Denied(request_id):
                error = message.error if isinstance(message, Refused) else message.error.error
                self._deliver(request_id, error)
            case Gone(request_id, reason):
                self._deliver(request_id, EngineStopped(reason))

    def _deliver(self, request_id: str, item: Accepted | RequestOutput | Exception) -> None:
        listener = self.listeners.get(request_id)
        if listener is None:
            return  # aborted meanwhile
        if isinstance(item, Exception) or (isinstance(item, RequestOutput) and item.finished):
            del self.listeners[request_id]
        listener((request_id, item))


class RemotePlacement:
    """The way of a call's requests to the owner, with what ``OutputStream`` uses of a ``Placement`` and its client."""

    def __init__(self, fleet: RemoteFleet, call: Call) -> None:
        self._fleet, self._call = fleet, call
        self._requests: list[Request] = []
        self._arrival_s = 0.0
        self.client = self
        """What takes the requests."""
        self.abort = fleet.abort

    def submit(self, request: Request, arrival_s: float, listener: Listener) -> None:
        """Take a request of the call; ``note_sent`` sends them all."""
        assert request.request_id is not None
        self._fleet.listeners[request.request_id] = listener
        self._requests.append(request)
        self._arrival_s = arrival_s

    def note_sent(self) -> None:
        """Send the call's requests, which all were submitted."""
        self._fleet.begin(self._call, self._requests, self._arrival_s)

    def move_on(self, error: Exception) -> bool:
        """Return False: the owner has tried other engines itself."""
        return False

    def last_error(self, error: Exception) -> Exception:
        """Return the error, which the owner has chosen."""
        return error

    def end(self) -> None:
        """Do nothing: the owner sees the call's end by that of its requests."""


class RemoteCallers:
    """Makes callers whose calls and tokens the owner counts.

    Args:
        send: Sends a message to the owner.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._number = 0
        self._asked: dict[int, asyncio.Future[None]] = {}

    def caller(self, key: ApiKey) -> Caller:
        """Return the caller of a key."""
        is_limited = key.requests_per_minute is not None or key.tokens_per_minute is not None
        return _RemoteCaller(key, self) if is_limited else Caller(key)

    async def admit(self, key: str) -> None:
        """Have the owner count a call.

        Raises:
            ApiError: 429: too many requests or tokens of late.
        """
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(encode(Admit(number, key)))
        try:
            await answer
        finally:
            del self._asked[number]

    def use_tokens(self, key: str, num_tokens: int) -> None:
        """Have the owner count tokens."""
        self._send(encode(UseTokens(key, num_tokens)))

    def take(self, message: Admitted) -> None:
        """Take the owner's answer."""
        answer = self._asked.get(message.number)
        if answer is None or answer.done():
            return  # its client has gone meanwhile
        if message.error is None:
            answer.set_result(None)
        else:
            answer.set_exception(_error_of(message))


def _error_of(message: Admitted) -> ApiError:
    assert message.error is not None
    return message.error.error


class _RemoteCaller(Caller):
    """A caller whose key has rates, which are of all workers together."""

    def __init__(self, key: ApiKey, callers: RemoteCallers) -> None:
        super().__init__(key)
        self._key_name, self._callers = key.name, callers

    async def enter(self) -> None:
        await self._callers.admit(self._key_name)

    def use_tokens(self, num_tokens: int) -> None:
        self._callers.use_tokens(self._key_name, num_tokens)

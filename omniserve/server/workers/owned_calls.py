"""The calls of API workers, as their owner has them: placed, sent to engines, and counted."""

from __future__ import annotations

import time
from typing import Any, Protocol

from omniserve.core.errors import EngineStopped, RequestRejected
from omniserve.core.logs import request_id as http_request_id
from omniserve.core.request import RequestOutput
from omniserve.routing.books import Call
from omniserve.server.engines.client import Accepted, Event
from omniserve.server.engines.messages import Refused
from omniserve.server.engines.placement import is_tried_elsewhere
from omniserve.server.errors import ApiError, engine_gone
from omniserve.server.service import Service
from omniserve.server.workers.messages import Begin, Denied, ErrorFields, Gone, encode


class Listener(Protocol):
    """The worker of a call."""

    def send(self, message: bytes) -> None:
        """Send a message, and before it what ``put`` was given."""
        ...

    def put(self, item: Accepted | RequestOutput | tuple[str, int], request_id: str) -> None:
        """Tell of a request."""
        ...

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        ...


class OwnedCall:
    """A call of a worker: what ``OutputStream`` does for the engines' side of one."""

    def __init__(self, worker: Listener, service: Service, begun: Begin) -> None:
        self._worker, self._service, self._begun = worker, service, begun
        self._requests = {request.request_id or "": request for request in begun.requests}
        self.left = set(self._requests)
        """Requests that have not ended."""
        self._queued: set[str] = set()
        self._accepted: set[str] = set()
        self._has_begun = False
        self._place: Any = None

    def begin(self) -> None:
        """Place the call and send its requests."""
        first, begun, service = self._begun.requests[0], self._begun, self._service
        try:
            service.engine.check_room()
            self._place = service.engine.place(
                Call(
                    kind=begun.kind,
                    service_class=first.service_class,
                    prompts=[request.prompt_token_ids for request in begun.requests[:: begun.num_samples]],
                    num_samples=begun.num_samples,
                    max_tokens=first.sampling.max_tokens,
                    ttft_s=begun.ttft_s,
                    salt=begun.salt,
                ),
                lora=first.lora,
            )
            service.backlog.enter(first.service_class, len(self.left), tenant=first.tenant, weight=first.weight)
        except ApiError as error:
            self._worker.send(encode(Denied(first.request_id or "", ErrorFields.of(error))))
            self._end_all()
            return
        self._queued = set(self.left)
        token = http_request_id.set(begun.http_request_id)
        try:
            self._submit()
        except EngineStopped as error:
            if not self._is_tried_elsewhere(error):
                self._tell_error(first.request_id or "", engine_gone(str(error), retry_after_s=1.0))
                self._end_all()
        finally:
            http_request_id.reset(token)

    def take(self, event: Event) -> None:
        """Take an event of the engine's client."""
        request_id, item = event
        if isinstance(item, int):
            self._worker.put((request_id, item), request_id)
        elif isinstance(item, RequestOutput):
            self._worker.put(item, request_id)
            if item.new_token_ids or item.finished:
                self._has_begun = True
                self._leave_queue(request_id)
            if item.finished:
                self._end(request_id)
        elif isinstance(item, Accepted):
            if request_id not in self._accepted:  # else by an engine that died before the first token
                self._accepted.add(request_id)
                self._worker.put(item, request_id)
        elif not self._is_tried_elsewhere(item):
            self._tell_error(request_id, self._place.last_error(item))
            self._end(request_id)

    def abort(self, request_id: str) -> None:
        """End a request."""
        if request_id in self.left:
            if self._place is not None:
                self._place.client.abort(request_id)
            self._end(request_id)

    def _submit(self) -> None:
        for request in self._begun.requests:
            self._place.client.submit(request, self._begun.arrival_s, self.take)
        self._place.note_sent()

    def _is_tried_elsewhere(self, error: Exception) -> bool:
        """Send the requests to the next engine if one refused them or died, and no output has begun."""
        if self._has_begun or len(self.left) < len(self._requests):
            return False
        return is_tried_elsewhere(self._place, error, self._requests, self._submit)

    def _tell_error(self, request_id: str, error: Exception) -> None:
        match error:
            case EngineStopped():
                self._worker.send(encode(Gone(request_id, str(error))))
            case ApiError():
                self._worker.send(encode(Denied(request_id, ErrorFields.of(error))))
            case _:
                load = dict(vars(error)) if isinstance(error, RequestRejected) else None
                self._worker.send(encode(Refused(request_id, str(error), load)))

    def _leave_queue(self, request_id: str) -> None:
        if request_id in self._queued:
            self._queued.discard(request_id)
            request = self._requests[request_id]
            waited_s = time.monotonic() - self._begun.arrival_s
            self._service.backlog.leave(request.service_class, waited_s, tenant=request.tenant)

    def _end(self, request_id: str) -> None:
        self._leave_queue(request_id)
        self.left.discard(request_id)
        self._worker.forget(request_id)
        if not self.left and self._place is not None:
            self._place.end()

    def _end_all(self) -> None:
        for request_id in [*self.left]:
            self._end(request_id)

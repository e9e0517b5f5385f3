"""The owner's side of the API workers: start them, serve their calls, notice their deaths, count for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import zmq

from omniserve.core.errors import EngineStopped, RequestRejected
from omniserve.core.logs import request_id as http_request_id
from omniserve.core.request import RequestOutput
from omniserve.routing.books import Call
from omniserve.server.access.limits import Caller
from omniserve.server.engines.client import Accepted, Event
from omniserve.server.engines.messages import Abort, Close, Refused, Step
from omniserve.server.engines.supervisor import pause_before
from omniserve.server.errors import ApiError, engine_gone
from omniserve.server.process_settings import engine_context
from omniserve.server.service import Service
from omniserve.server.workers.links import Link
from omniserve.server.workers.messages import (
    Admit,
    Admitted,
    AskCounts,
    Begin,
    Counted,
    Denied,
    Drain,
    Drained,
    ErrorFields,
    Failed,
    Gone,
    Hello,
    Ready,
    State,
    UseTokens,
    decode_from_worker,
    encode,
)
from omniserve.server.workers.process import WorkerSettings, run_worker

logger = logging.getLogger("omniserve.server")

# How often it is looked whether the workers have to know something new of the engines.
_LOOK_EVERY_S = 0.1
# A worker that answers no sooner counts with what it told before.
_COUNTS_TIMEOUT_S = 1.0
_CLOSE_S = 5.0
# A worker that ran this long before it died is no part of a row of failures.
_WELL_AFTER_S = 60.0


class WorkerPool:
    """The API workers of a server.

    Args:
        service: The owner's service.
        settings: What all workers are made of.
        callers: Those of the keys, by name.
        count: Number of workers.
    """

    def __init__(self, service: Service, settings: WorkerSettings, callers: Mapping[str, Caller], count: int) -> None:
        self._service, self._settings, self._callers, self._count = service, settings, callers, count
        self._workers: list[_Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._made = contextlib.ExitStack()
        self._folder = self._made.enter_context(tempfile.TemporaryDirectory(prefix="omniserve-workers-"))
        self._is_stopping = False

    def listen(self) -> socket.socket:
        """Return the socket on which the owner's application answers what the workers hand on."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._owner_path)
        return listener

    @property
    def _owner_path(self) -> str:
        return f"{self._folder}/owner"

    async def start(self) -> None:
        """Start the workers; return when all accept connections.

        Raises:
            EngineStopped: One could not start; the message says why.
        """
        self._context = zmq.Context()
        self._made.callback(self._context.destroy, linger=0)
        self._workers = [self._new_worker(number, 0) for number in range(self._count)]
        try:
            await asyncio.gather(*(worker.ready for worker in self._workers))
        except EngineStopped:
            await self.close()
            raise
        self._service.loras.on_change = self._tell_state
        self._tasks = [asyncio.create_task(self._keep_running(number)) for number in range(self._count)]
        self._tasks.append(asyncio.create_task(self._look()))
        self._service.gather_counts = self.gather_counts

    async def gather_counts(self) -> None:
        """Add what the workers' metrics have counted to the owner's."""
        asked = [worker.ask_counts() for worker in self._workers]
        if asked:
            await asyncio.wait(asked, timeout=_COUNTS_TIMEOUT_S)

    async def drain(self, timeout_s: float) -> None:
        """Have the workers take no new calls; wait for the running ones, and end those that take too long."""
        self._is_stopping = True
        for worker in self._workers:
            worker.kill_unless_ready()
            worker.send(encode(Drain(timeout_s)))
        await asyncio.gather(*(worker.over.wait() for worker in self._workers))

    async def close(self) -> None:
        """End the workers."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._made.close()

    def _new_worker(self, number: int, start: int) -> _Worker:
        names = [f"ipc://{self._folder}/{number}-{start}-{way}" for way in ("in", "out")]
        arguments = (self._settings, names[1], names[0], self._owner_path)
        return _Worker(self._service, self._callers, self._context, names, arguments, number)

    async def _keep_running(self, number: int) -> None:
        starts = num_failures = 0
        while True:
            worker, began_s = self._workers[number], time.monotonic()
            await worker.over.wait()
            if self._is_stopping:
                return
            if time.monotonic() - began_s >= _WELL_AFTER_S:
                num_failures = 0
            pause_s = pause_before(num_failures)
            logger.error("API process %d has ended: %s; it is started again in %g s", number, worker.failure, pause_s)
            num_failures += 1
            await worker.close()
            await asyncio.sleep(pause_s)
            starts += 1
            self._workers[number] = self._new_worker(number, starts)

    async def _look(self) -> None:
        told = None
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            engine = self._service.engine
            if (seen := (engine.failure, engine.failure and engine.retry_after_s)) != told:
                told = seen
                self._tell_state()

    def _tell_state(self) -> None:
        for worker in self._workers:
            worker.tell_state()


class _Worker:
    """One worker: its process, its link, and the calls that it has begun."""

    def __init__(
        self,
        service: Service,
        callers: Mapping[str, Caller],
        context: zmq.Context,
        addresses: list[str],
        arguments: tuple[WorkerSettings, str, str, str],
        number: int,
    ) -> None:
        self._service, self._callers = service, callers
        self._calls: dict[str, _Call] = {}
        """Calls by the ids of their requests that still run."""
        self._accepted: list[tuple[str, Any, Any]] = []
        self._outputs: list[Any] = []
        """What is to be told of requests, at the end of the event loop's turn: one message for a step's outputs."""
        self._counts: dict[int, asyncio.Future[None]] = {}
        self._num_asked = 0
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.failure = "it was closed"
        self.over = asyncio.Event()
        """Set when the process has drained or ended."""
        self._link = Link(context, addresses[0], addresses[1], binds=True, take=self._take)
        self._process = engine_context().Process(
            target=run_worker, args=arguments, name=f"omniserve-api-{number}", daemon=True
        )
        self._process.start()
        self._loop.add_reader(self._process.sentinel, self._on_death)
        self._is_watched = True

    @property
    def pid(self) -> int | None:
        """The number of its process."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Send a message behind all that was told of requests."""
        self._flush()
        self._link.send(message)

    def tell_state(self) -> None:
        """Tell the worker of the engines."""
        engine = self._service.engine
        retry_after_s = None if engine.failure is None else engine.retry_after_s
        self.send(encode(State(engine.failure, retry_after_s, dict(self._service.loras.served))))

    def kill_unless_ready(self) -> None:
        """End a process that is only starting: it hears nothing."""
        if not self.ready.done():
            self._process.kill()

    def ask_counts(self) -> asyncio.Future[None]:
        """Return a future that is done when the worker has told what its metrics counted, or has ended."""
        self._num_asked += 1
        answer = self._counts[self._num_asked] = self._loop.create_future()
        if self.ready.done() and not self.over.is_set():
            self.send(encode(AskCounts(self._num_asked)))
        else:
            self._counts.pop(self._num_asked).set_result(None)
        return answer

    async def close(self) -> None:
        """End the process and all that it has begun. Calling it again does nothing."""
        self.send(encode(Close()))
        await asyncio.to_thread(self._process.join, _CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, _CLOSE_S)
        self._on_death()

    def put(self, item: Accepted | RequestOutput | tuple[str, int], request_id: str) -> None:
        """Tell of a request."""
        if not self._outputs and not self._accepted:
            self._loop.call_soon(self._flush)
        if isinstance(item, Accepted):
            self._accepted.append((request_id, item.predicted_ttft_s, item.scaled_slo))
        else:
            self._outputs.append(item)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._calls.pop(request_id, None)

    def _flush(self) -> None:
        if self._outputs or self._accepted:
            accepted, outputs, self._accepted, self._outputs = self._accepted, self._outputs, [], []
            self._link.send(encode(Step(accepted, outputs)))

    def _take(self, data: bytes) -> None:
        message = decode_from_worker(data)
        match message:
            case Begin():
                call = _Call(self, self._service, message)
                self._calls |= dict.fromkeys(call.left, call)
                call.begin()
            case Abort(request_id):
                if (running := self._calls.get(request_id)) is not None:
                    running.abort(request_id)
            case Admit(number, key):
                try:
                    self._callers[key].admit()
                    error = None
                except ApiError as refused:
                    error = ErrorFields.of(refused)
                self.send(encode(Admitted(number, error)))
            case UseTokens(key, num_tokens):
                self._callers[key].use_tokens(num_tokens)
            case Counted(number, counts):
                self._service.metrics.add_counts(counts)
                if (answer := self._counts.pop(number, None)) is not None and not answer.done():
                    answer.set_result(None)
            case Hello():
                self.tell_state()
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(None)
            case Failed(reason):
                self.failure = reason
            case Drained():
                self.over.set()

    def _on_death(self) -> None:
        if not self._is_watched:
            return
        self._is_watched = False
        self._loop.remove_reader(self._process.sentinel)
        if self.failure == "it was closed" and self._process.exitcode:
            self.failure = f"its process died (exit code {self._process.exitcode})"
        self._link.close()
        for request_id in [*self._calls]:
            if (call := self._calls.get(request_id)) is not None:
                call.abort(request_id)
        for answer in self._counts.values():
            if not answer.done():
                answer.set_result(None)
        self._counts.clear()
        if not self.ready.done():
            self.ready.set_exception(EngineStopped(f"an API process could not start: {self.failure}"))
            self.ready.exception()  # that of one that is started again is told by its failure
        self.over.set()


class _Call:
    """A call of a worker: what ``OutputStream`` does for the engines' side of one."""

    def __init__(self, worker: _Worker, service: Service, begun: Begin) -> None:
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
        while not self._has_begun and len(self.left) == len(self._requests):
            before = self._place.client
            if not self._place.move_on(error):
                return False
            for request_id in self._requests:
                before.abort(request_id)
            try:
                self._submit()
                return True
            except EngineStopped as stopped:
                error = stopped
        return False

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

"""Worker: the owner's side of one API worker: its process, its link, and the calls that it has begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import zmq

from omniserve.core.errors import EngineStopped
from omniserve.core.request import RequestOutput
from omniserve.server.access.limits import Caller
from omniserve.server.engines.client import Accepted
from omniserve.server.engines.messages import Abort, Close, Step
from omniserve.server.errors import ApiError
from omniserve.server.process_settings import engine_context
from omniserve.server.service import Service
from omniserve.server.workers.links import Link
from omniserve.server.workers.messages import (
    Admit,
    Admitted,
    AskCounts,
    Begin,
    Counted,
    Drained,
    ErrorFields,
    Failed,
    Hello,
    Ready,
    State,
    UseTokens,
    decode_from_worker,
    encode,
)
from omniserve.server.workers.owned_calls import OwnedCall
from omniserve.server.workers.process import WorkerSettings, run_worker

_CLOSE_S = 5.0
# The exit code of a process whose descriptors are closed is there so soon.
_EXIT_S = 0.2


class Worker:
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
        self._calls: dict[str, OwnedCall] = {}
        """Calls by the ids of their requests that still run."""
        self._accepted: list[tuple[str, Any, Any]] = []
        self._outputs: list[Any] = []
        """What is to be told of requests, at the end of the event loop's turn: one message for a step's outputs."""
        self._counted: asyncio.Future[None] | None = None
        """Done when the worker has answered ``AskCounts``; None: it was not asked yet."""
        self._heard_s = time.monotonic()
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
    def has_calls(self) -> bool:
        """A call of it runs."""
        return bool(self._calls)

    def send(self, message: bytes) -> None:
        """Send a message, and before it what ``put`` was given."""
        self._flush()
        self._link.send(message)

    def tell_state(self) -> None:
        """Tell the worker of the engines."""
        engine = self._service.engine
        retry_after_s = None if engine.failure is None else engine.retry_after_s
        back_s = None if retry_after_s is None else time.monotonic() + retry_after_s
        self.send(encode(State(engine.failure, back_s, dict(self._service.loras.served))))

    def kill_unless_ready(self) -> None:
        """End a process that is only starting: it hears nothing."""
        if not self.ready.done():
            self._process.kill()

    def kill(self, reason: str) -> None:
        """End a process that hangs."""
        self.failure = reason
        self._process.kill()

    def check_pulse(self, patience_s: float, stood_still_s: float) -> None:
        """Kill the process if it has sent nothing for so long: clients that are connected to it would wait for ever.

        Args:
            patience_s: Longest time in seconds, in which it was asked for its counts.
            stood_still_s: For so long of it the owner itself has read nothing.
        """
        self._heard_s += stood_still_s
        is_silent = time.monotonic() - self._heard_s > patience_s
        if is_silent and self.ready.done() and not self.over.is_set():
            self.kill(f"it gave no sign of life for {patience_s:g} s, and was killed")

    def ask_counts(self) -> asyncio.Future[None]:
        """Return a future that is done when the worker has told what its metrics counted, or has ended.

        One that hangs is not asked again: all wait for the same answer.
        """
        if self._counted is None or self._counted.done():
            self._counted = self._loop.create_future()
            if self.ready.done() and not self.over.is_set():
                self.send(encode(AskCounts()))
            else:
                self._counted.set_result(None)
        return self._counted

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
        self._heard_s = time.monotonic()
        message = decode_from_worker(data)
        match message:
            case Begin():
                call = OwnedCall(self, self._service, message)
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
            case Counted(counts):
                self._service.metrics.add_counts(counts)
                assert self._counted is not None
                self._counted.set_result(None)
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
        self._process.join(_EXIT_S)
        if self.failure == "it was closed" and self._process.exitcode:
            self.failure = f"its process died (exit code {self._process.exitcode})"
        self._link.close()
        for request_id in [*self._calls]:
            if (call := self._calls.get(request_id)) is not None:
                call.abort(request_id)
        if self._counted is not None and not self._counted.done():
            self._counted.set_result(None)
        if not self.ready.done():
            self.ready.set_exception(EngineStopped(f"an API process could not start: {self.failure}"))
            self.ready.exception()  # that of one that is started again is told by its failure
        self.over.set()

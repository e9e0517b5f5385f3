"""WorkerPool: the API workers of a server are started, started again after a death, drained and counted for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
import time
from collections.abc import Mapping

import zmq

from omniserve.server.access.limits import Caller
from omniserve.server.engines.supervisor import pause_before
from omniserve.server.service import Service
from omniserve.server.workers.messages import Drain, encode
from omniserve.server.workers.process import WorkerSettings
from omniserve.server.workers.worker import Worker

logger = logging.getLogger("omniserve.server")

# How often it is looked whether the workers have to know something new of the engines.
_LOOK_EVERY_S = 0.1
# A worker that answers no sooner counts with what it told before.
_COUNTS_TIMEOUT_S = 1.0
# A worker that ran this long before it died is no part of a row of failures.
_WELL_AFTER_S = 60.0
# It is looked for signs of life so often in the time that a worker may give none.
_LOOKS = 4
# Beside the time that calls have, a worker has so long to say that they have ended.
_DRAIN_S = 5.0


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
        self._workers: list[Worker] = []
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
        await asyncio.gather(*(asyncio.shield(worker.ready) for worker in self._workers))
        self._service.loras.on_change = self._tell_state
        self._tasks = [asyncio.create_task(self._keep_running(number)) for number in range(self._count)]
        self._tasks += [asyncio.create_task(self._look()), asyncio.create_task(self._feel_pulses())]
        for task in self._tasks:
            task.add_done_callback(_tell_of_bug)
        self._service.gather_counts = self.gather_counts
        self._service.workers_have_calls = lambda: any(worker.has_calls for worker in self._workers)

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
        ends = [asyncio.create_task(worker.over.wait()) for worker in self._workers]
        if ends:
            await asyncio.wait(ends, timeout=timeout_s + _DRAIN_S)
        for worker, end in zip(self._workers, ends, strict=True):
            end.cancel()
            if not worker.over.is_set():
                logger.error("an API process did not stop, and is killed")
                worker.kill("it did not stop")

    async def close(self) -> None:
        """End the workers."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._made.close()

    def _new_worker(self, number: int, start: int) -> Worker:
        names = [f"ipc://{self._folder}/{number}-{start}-{way}" for way in ("in", "out")]
        arguments = (self._settings, names[1], names[0], self._owner_path)
        return Worker(self._service, self._callers, self._context, names, arguments, number)

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
            if self._is_stopping:
                return
            starts += 1
            self._workers[number] = self._new_worker(number, starts)

    async def _look(self) -> None:
        told = None
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            engine = self._service.engine
            retry_after_s = None if engine.failure is None else engine.retry_after_s
            back_s = None if retry_after_s is None else round(time.monotonic() + retry_after_s)
            if (seen := (engine.failure, back_s)) != told:
                told = seen
                self._tell_state()

    async def _feel_pulses(self) -> None:
        """Kill workers that give no sign of life; ``_keep_running`` starts others."""
        patience_s = self._service.limits.engine_heartbeat_s
        every_s = patience_s / _LOOKS
        while not self._is_stopping:
            looked_s = time.monotonic()
            for worker in self._workers:
                worker.ask_counts()
            await asyncio.sleep(every_s)
            stood_still_s = max(0.0, time.monotonic() - looked_s - every_s)
            for worker in self._workers:
                worker.check_pulse(patience_s, stood_still_s)

    def _tell_state(self) -> None:
        for worker in self._workers:
            worker.tell_state()


def _tell_of_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("API processes are not looked after any more, because of a bug", exc_info=error)

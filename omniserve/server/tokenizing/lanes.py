"""Threads beside the event loop, each of which does one piece of work after another."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class _Interrupted(BaseException):
    """Raised in a thread whose work takes too long; no ``except Exception`` of that work holds it up."""


@dataclass(slots=True)
class _Job:
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    limit_s: float | None
    began_s: float | None = None
    """Monotonic time at which the thread took it; None: it waits."""
    has_ended: bool = False


class Lane:
    """A thread that does what it is given, in order; it starts with the first piece of work.

    Whatever waits when its caller is cancelled is not done. Work that exceeds its time limit is interrupted at its next
    step of Python, and what waits behind it goes on at once in another thread.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Guards which thread is the lane's, and whether a job has ended."""
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[..., T], *args: Any, limit_s: float | None = None) -> T:
        """Return what ``work`` returns, or raise what it raises.

        Args:
            work: Called in the thread.
            args: Its arguments.
            limit_s: Seconds that it may take once it has begun; None: any.

        Raises:
            TimeoutError: It took longer.
        """
        loop = asyncio.get_running_loop()
        job = _Job(lambda: work(*args), loop.create_future(), limit_s)
        if self._thread is None:
            self._start()
        self._jobs.put(job)
        watch = None if limit_s is None else _Watch(loop, self._overdue_s, job)
        try:
            result: T = await job.result
            return result
        finally:
            if watch is not None:
                watch.stop()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._do_jobs, name=self._name, daemon=True)
        self._thread.start()

    def _do_jobs(self) -> None:
        # Interrupted, at whatever point: the lane has another thread by then.
        with contextlib.suppress(_Interrupted):
            while self._do(self._jobs.get()):
                pass

    def _do(self, job: _Job) -> bool:
        """Do a job; return whether this thread is still the lane's."""
        if job.result.cancelled():
            return True
        job.began_s = time.monotonic()
        result, error = None, None
        try:
            result = job.work()
        except Exception as raised:
            error = raised
        with self._lock:
            job.has_ended = True
            if self._thread is not threading.current_thread():
                return False
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended meanwhile
            job.result.get_loop().call_soon_threadsafe(_settle, job.result, result, error)
        return True

    def _overdue_s(self, job: _Job) -> float | None:
        """Return the seconds that a job has left at least, None if it has ended; interrupt it if there are none."""
        assert job.limit_s is not None
        with self._lock:
            if job.has_ended or job.result.done():
                return None
            if job.began_s is None:
                return job.limit_s
            left_s = job.began_s + job.limit_s - time.monotonic()
            if left_s > 0:
                return left_s
            thread = self._thread
            self._start()
            assert thread is not None and thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))
        job.result.set_exception(TimeoutError())
        return None


class _Watch:
    """Looks at a job when it may be overdue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, left_s: Callable[[_Job], float | None], job: _Job) -> None:
        self._loop, self._left_s, self._job = loop, left_s, job
        self._timer = loop.call_later(job.limit_s or 0.0, self._look)

    def _look(self) -> None:
        left_s = self._left_s(self._job)
        if left_s is not None:
            self._timer = self._loop.call_later(left_s, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

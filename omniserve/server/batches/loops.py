"""Loops that go on after an error, and threads for calls that block: the base of all work on batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from omniserve.server.batches.database import StorageError
from omniserve.server.batches.owner import NotOwner

logger = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

POLL_S = 1.0
"""Seconds until a change by another server is seen; one by a client of this server is seen at once."""
RETRY_S = 5.0
"""Seconds until a loop goes on after an error."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Events that wake a loop before its next poll."""

    lines: asyncio.Event = field(default_factory=asyncio.Event)
    batches: asyncio.Event = field(default_factory=asyncio.Event)


class OneThread:
    """A thread for what blocks: one call after the other."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Call a function there. A cancelled caller does not wait for it, but it is called all the same."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def stop(self) -> None:
        """Wait for the calls that are under way; take no more."""
        await asyncio.to_thread(self._executor.shutdown)


async def forever(step: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
    """Do a step again and again until cancelled; after an error, which is logged, a little later.

    Raises:
        NotOwner: The step found that this server is not the owner any more.
    """
    while True:
        try:
            await step()
        except NotOwner:
            raise
        except StorageError as error:
            logger.warning("batches: %s; trying again in %g s", error, RETRY_S)
            await asyncio.sleep(RETRY_S)
        except Exception:
            logger.exception("batches: unexpected; trying again in %g s", RETRY_S)
            await asyncio.sleep(RETRY_S)


async def set_or_polled(changed: asyncio.Event) -> None:
    """Wait until there is something to look at, or it is time to look at what others did."""
    try:
        # Not wait_for, which before Python 3.12 forgets that it was cancelled if the event comes at the same time.
        async with asyncio.timeout(POLL_S):
            await changed.wait()
    except TimeoutError:
        pass  # time to look at what others did

"""Leases: what this server has claimed stays its own while it lives, and it stops what it can no longer hold."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from omniserve.server.batches.claims import Claims, LineKey
from omniserve.server.batches.database import StorageError
from omniserve.server.batches.loops import OneThread
from omniserve.server.batches.running_lines import RunningLines

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3


class Leases:
    """Holds the claims of one owner.

    Args:
        running: The lines that it should have; those that it lost are dropped.
        claims: Renewed.
        claims_thread: Where they are called.
    """

    def __init__(self, running: RunningLines, claims: Claims, claims_thread: OneThread) -> None:
        self._running = running
        self._claims = claims
        self._claims_thread = claims_thread
        self._orphans: set[LineKey] = set()
        self._renewed_s = time.monotonic()

    def begin(self) -> None:
        """Count leases from now; nothing is claimed yet."""
        self._renewed_s = time.monotonic()

    async def renew(self) -> None:
        """Wait for a third of a lease, then hold everything for another one."""
        await asyncio.sleep(self._claims.lease_s / _RENEWALS_PER_LEASE)
        before = list(self._running.by_key.values())
        started_s = time.monotonic()
        renewing = asyncio.ensure_future(self._claims_thread.run(self._claims.renew))
        left_s = self._renewed_s + self._claims.lease_s - started_s
        await asyncio.wait([renewing], timeout=max(0.0, left_s))
        if not renewing.done() or renewing.exception() is not None:
            if before and time.monotonic() - self._renewed_s >= self._claims.lease_s:
                logger.warning("batches: %d lines were not renewed in time and are left to others", len(before))
                await self._running.drop(before)
            await asyncio.wait([renewing])
        try:
            mine = renewing.result()
            self._renewed_s = started_s
            await self._claims_thread.run(self._claims.renew_batch)
        except StorageError as error:
            logger.warning("batches: %s; leases are renewed later", error)
            return
        # Claimed, but the answer never came here: not on the way, if they were unknown the last time, too.
        unknown = mine - self._running.by_key.keys()
        for key in unknown & self._orphans:
            await self._claims_thread.run(partial(self._claims.give_back, key, delay_s=0.0))
        self._orphans = unknown
        lost = [entry for entry in before if entry.line.key not in mine]
        await self._running.drop([entry for entry in lost if self._running.by_key.get(entry.line.key) is entry])

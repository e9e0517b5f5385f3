"""DiskTier: threads that copy blocks of prefixes between the host pool and the disk tier's file, beside the steps.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from omniserve.core.stats import DiskStats
from omniserve.core.work import DiskCopy, Done
from omniserve.host.disk_file import DiskFile

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20  # a thread copies so much at a time
_NUM_THREADS = 2
_NICENESS = {False: 10, True: 19}
"""Niceness of the threads, by ``to_disk``. Reads get more of the cores than writes, as requests wait for them."""


class _Flight:
    """A copy under way."""

    def __init__(self, copy: DiskCopy, num_pieces: int) -> None:
        self.copy = copy
        self.num_left = num_pieces
        self.began_s: float | None = None
        """Time at which the copy's first piece began; None before."""
        self.errors: list[str] = []


class DiskTier:
    """Runs copies; every copy yields exactly one ``Done``. One thread calls it.

    Reads and writes go through the kernel's page cache: reading around it (O_DIRECT) was not faster.

    Args:
        file: Is closed with the tier.
        pools: The host tier's pool, ``[L, B, ...]``, and in int8 its scales.
        num_threads: Threads that read, and threads that write.
    """

    def __init__(self, file: DiskFile, pools: Sequence[Tensor], *, num_threads: int = _NUM_THREADS) -> None:
        self.file = file
        num_layers, self._num_blocks = pools[0].shape[:2]
        self._layers: list[tuple[memoryview, int]] = []  # of each pool, with the bytes of a block
        for pool in pools:
            bytes_LX = pool.view(torch.uint8).reshape(num_layers, -1).numpy()
            self._layers += [(layer.data, bytes_LX.shape[1] // self._num_blocks) for layer in bytes_LX]
        block_bytes = sum(part_bytes for _, part_bytes in self._layers)
        assert block_bytes == file.block_bytes, "the file is for blocks of another size"
        self._blocks_per_piece = max(1, _PIECE_BYTES // file.block_bytes)
        self._threads = {
            to_disk: ThreadPoolExecutor(
                num_threads, thread_name_prefix="omniserve-disk", initializer=_give_way, initargs=(_NICENESS[to_disk],)
            )
            for to_disk in (False, True)
        }
        self._events: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._num_started = self._num_ended = 0
        self._bytes = {True: 0, False: 0}  # by ``to_disk``
        self._failures = 0
        self._logged: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def busy(self) -> bool:
        """True while a copy has not reported its end through ``poll``."""
        return self._num_started > self._num_ended

    def start(self, copy: DiskCopy) -> None:
        """Start a copy. Its host blocks and slots are not used otherwise until its event.

        Raises:
            ValueError: A host block or a slot is out of range, or the counts differ.
        """
        if not len(copy.host_block_ids) == len(copy.slots) == len(copy.keys) > 0:
            raise ValueError(f"a copy needs as many slots and keys as blocks, and one of each at least: {copy}")
        for ids, most in ((copy.host_block_ids, self._num_blocks), (copy.slots, self.file.num_slots)):
            if not 0 <= min(ids) <= max(ids) < most:
                raise ValueError(f"ids must be in [0, {most}), got {min(ids)} to {max(ids)}")
        self._num_started += 1
        pieces = range(0, len(copy.slots), self._blocks_per_piece)
        flight = _Flight(copy, len(pieces))
        for first in pieces:
            self._threads[copy.to_disk].submit(self._run_piece, flight, first)

    def poll(self) -> list[Done]:
        """Return the events of the copies that have ended since the last call. Never blocks."""
        events: list[Done] = []
        while not self._events.empty():
            event = self._events.get()
            self._num_ended += 1
            self._failures += not event.ok
            if event.message and event.message not in self._logged:
                self._logged.add(event.message)
                logger.warning("disk tier: %s (counted from now on, not logged again)", event.message)
            events.append(event)
        return events

    def stats(self) -> DiskStats:
        """Return the counters."""
        return DiskStats(bytes_read=self._bytes[False], bytes_written=self._bytes[True], failures=self._failures)

    def close(self) -> None:
        """Let copies that have not begun fail, wait for the others, and close the file. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for threads in self._threads.values():
                threads.shutdown(wait=True)
            self.file.close()

    def _run_piece(self, flight: _Flight, first: int) -> None:
        copy = flight.copy
        piece = slice(first, first + self._blocks_per_piece)
        error = ""
        with self._lock:
            flight.began_s = began_s = flight.began_s or time.monotonic()
        try:
            if self._closed:
                raise RuntimeError("the disk tier was closed")
            self._copy_blocks(copy.to_disk, copy.host_block_ids[piece], copy.slots[piece], copy.keys[piece])
        except Exception as caught:  # whatever it is fails this copy: a request may wait for its event
            error = f"{type(caught).__name__}: {caught}"
        with self._lock:
            flight.num_left -= 1
            if error:
                flight.errors.append(error)
            if flight.num_left:
                return
            if not flight.errors:
                self._bytes[copy.to_disk] += len(copy.slots) * self.file.block_bytes
        seconds = time.monotonic() - began_s
        message = flight.errors[0] if flight.errors else ""
        self._events.put(Done(move_id=copy.move_id, ok=not flight.errors, seconds=seconds, message=message))

    def _copy_blocks(self, to_disk: bool, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[bytes]) -> None:
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            parts = [layer[block * size : (block + 1) * size] for layer, size in self._layers]
            if to_disk:
                self.file.write(slot, key, parts)
            else:
                self.file.read(slot, key, parts)


def _give_way(niceness: int) -> None:
    """Make this thread alone nicer than the process, by ``niceness``."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + niceness)
    except OSError as error:
        logger.warning("disk tier: its threads have the priority of the steps: %s", error)

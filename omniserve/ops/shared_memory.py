"""SharedMemoryGroup: collectives among ranks on the CPU of one machine, through memory that they share.

Each rank has two slots in a file that all have mapped. A collective copies a tensor to one of them, says so, waits
until the others have, and reads theirs. The next one uses the other slot: when all have come to it, all have read the
first.
Sums are made in the order of the ranks, so that all have the same to the bit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_meet = torch.ops.omniserve_ranks.meet.default

_LINE = 8
"""int64s of a cache line."""
_SLOT_BYTES = 8 << 20
"""Larger tensors go in several turns."""


class SharedMemoryGroup:
    """The ranks of a machine, from one of them.

    Args:
        path: Path of the file, as ``make_file`` made it.
        timeout_s: How long a rank waits for another one.
    """

    def __init__(self, path: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = rank, num_ranks, timeout_s
        with torch.inference_mode(False):
            self._memory = torch.from_file(path, shared=True, size=_file_bytes(num_ranks), dtype=torch.uint8)
            lines = self._memory[: 2 * 8 * _LINE * num_ranks].view(torch.int64).view(2, num_ranks, _LINE)
            self._turns, self._pids = lines.unbind()
        self._pids[rank, 0] = os.getpid()
        self._turn = 0
        self._slots: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._meet()  # all have written their pid then

    def size(self) -> int:
        """Return how many ranks there are."""
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, contiguous.

        Raises:
            RuntimeError: A rank is gone, or did not come in time.
        """
        total = torch.empty(x.shape, dtype=x.dtype)
        source, target = x.contiguous().view(-1), total.view(-1)
        for begin, end in self._pieces(source):
            parts = self._exchange(source[begin:end])
            torch.add(parts[0], parts[1], out=target[begin:end])
            if self._size > 2:
                rest = torch.stack(parts).float().sum(dim=0)
                target[begin:end].copy_(rest)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Return a tensor of all ranks, ``[ranks, *x.shape]``.

        Raises:
            RuntimeError: As ``all_reduce``.
        """
        gathered = torch.empty(self._size, x.numel(), dtype=x.dtype)
        source = x.contiguous().view(-1)
        for begin, end in self._pieces(source):
            for target, part in zip(gathered, self._exchange(source[begin:end]), strict=True):
                target[begin:end].copy_(part)
        return gathered.view(self._size, *x.shape)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite a tensor by that of rank 0.

        Raises:
            RuntimeError: As ``all_reduce``.
        """
        x.copy_(self.all_gather(x)[0])

    def _pieces(self, source: Tensor) -> Iterator[tuple[int, int]]:
        most = _SLOT_BYTES // source.element_size()
        for begin in range(0, source.numel(), most):
            yield begin, min(source.numel(), begin + most)

    def _exchange(self, source: Tensor) -> list[Tensor]:
        """Return the parts of all ranks, which are overwritten in the turn after the next."""
        slots = self._slots_of(source.dtype)[(self._turn + 1) % 2]
        count = source.numel()
        slots[self._rank][:count].copy_(source)
        self._meet()
        return [slot[:count] for slot in slots]

    def _slots_of(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        if dtype not in self._slots:
            with torch.inference_mode(False):  # they are written to inside and outside of that mode
                slots = self._memory[_header_bytes(self._size) :].view(dtype).view(2, self._size, -1)
                self._slots[dtype] = list(slots[0].unbind()), list(slots[1].unbind())
        return self._slots[dtype]

    def _meet(self) -> None:
        self._turn += 1
        missing = _meet(self._turns, self._pids, self._rank, self._turn, self._timeout_s)
        if missing >= self._size:
            raise RuntimeError(f"rank {missing - self._size} is gone")
        if missing >= 0:
            raise RuntimeError(f"rank {missing} did not come to a collective within {self._timeout_s:g} s")


def make_file(num_ranks: int) -> str:
    """Make the file of a group, empty, in memory if the machine has a place for such files; return its path."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    descriptor, path = tempfile.mkstemp(prefix="omniserve-ranks-", dir=folder)
    os.ftruncate(descriptor, _file_bytes(num_ranks))
    os.close(descriptor)
    return path


def _header_bytes(num_ranks: int) -> int:
    return -(-2 * 8 * _LINE * num_ranks // 4096) * 4096


def _file_bytes(num_ranks: int) -> int:
    return _header_bytes(num_ranks) + 2 * num_ranks * _SLOT_BYTES

"""Collectives among the ranks of a tensor-parallel model, as operators that a compiled half or a CUDA graph can hold.

``omniserve::all_reduce`` sums a tensor over the ranks, ``omniserve::all_gather`` puts the last dimensions of all ranks
side by side. They go through torch.distributed: NCCL on GPUs, gloo on CPUs of several machines; on the CPU of one
machine they go through memory that the ranks share (``shared_memory``). All ranks must call them in the same order. A
process has one group at most (``connect``). Without one they raise, but for ``alone``: what needs the shapes and not
the values, such as tracing, compiling and measuring a rank's own work, runs there without the other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveCall(NamedTuple):
    """A collective, without its rows."""

    kind: str
    """``all_reduce`` or ``all_gather``."""
    width: int
    """Features of a row of its result."""


class Group(Protocol):
    """The ranks of a stage, and the operations that they perform together."""

    def size(self) -> int: ...
    def all_reduce(self, x: Tensor) -> Tensor: ...
    def all_gather(self, x: Tensor) -> Tensor: ...
    def broadcast(self, x: Tensor) -> None: ...


class DistributedGroup:
    """A process group of torch.distributed, as ``Group``."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        """Return how many ranks there are."""
        return int(self._group.size())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, contiguous."""
        total = x.clone(memory_format=torch.contiguous_format)
        self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Return a tensor of all ranks, ``[ranks, *x.shape]``."""
        gathered = x.new_empty(self.size() * x.numel())
        self._group._allgather_base(gathered, x.contiguous().view(-1)).wait()
        return gathered.view(self.size(), *x.shape)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite a tensor by that of rank 0."""
        self._group.broadcast([x], dist.BroadcastOptions()).wait()


class _Ranks:
    """The group of this process."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.size = 1
        self.is_alone = False
        self.record: list[CollectiveCall] | None = None


_ranks = _Ranks()


def connect(group: Group) -> None:
    """Use this group from now on.

    Raises:
        RuntimeError: There is one already.
    """
    if _ranks.group is not None:
        raise RuntimeError("this process has a group of ranks already")
    _ranks.group, _ranks.size = group, group.size()


def disconnect() -> None:
    """Use no group any more."""
    _ranks.group, _ranks.size = None, 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run the collectives without the other ranks meanwhile; shapes are right, values are this rank's alone."""
    before, _ranks.is_alone = _ranks.is_alone, True
    try:
        yield
    finally:
        _ranks.is_alone = before


@contextlib.contextmanager
def recorded() -> Iterator[list[CollectiveCall]]:
    """Yield a list that gets the collectives that are called meanwhile."""
    calls: list[CollectiveCall] = []
    _ranks.record = calls
    try:
        yield calls
    finally:
        _ranks.record = None


def run(calls: Sequence[CollectiveCall], rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Call collectives on rows of zeros, one after the other, and wait for the device."""
    for kind, width in calls:
        if kind == "all_reduce":
            _all_reduce(torch.zeros(rows, width, dtype=dtype, device=device))
        else:
            part = -(-width // _ranks.size)
            _all_gather(torch.zeros(rows, part, dtype=dtype, device=device), width, _ranks.size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def broadcast(tensor: Tensor) -> None:
    """Overwrite a tensor on the device by that of rank 0."""
    if not _ranks.is_alone:
        _group().broadcast(tensor)


def on_all_ranks(flags: Sequence[bool]) -> list[bool]:
    """Return which flags are set on all ranks of this one's stage, on a CPU; there may be no other rank."""
    if _ranks.group is None or _ranks.is_alone:
        return [*flags]
    counts = _group().all_reduce(torch.tensor(flags, dtype=torch.float32))
    return (counts == _ranks.size).tolist()


def shard_range(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return where a rank's part of ``size`` features begins and ends: equal parts, but for the last ones.

    These are the parts of ``torch.chunk``.
    """
    part = -(-size // num_ranks)
    return min(size, rank * part), min(size, (rank + 1) * part)


def _group() -> Group:
    if _ranks.group is None:
        raise RuntimeError(
            "this model is one rank's part of a tensor-parallel model, and no other ranks are connected: serve it with "
            "tensor_parallel_size, which starts them"
        )
    return _ranks.group


_library = torch.library.Library("omniserve", "FRAGMENT")
_library.define("all_reduce(Tensor x) -> Tensor")
_library.define("all_gather(Tensor x, int size, int num_ranks) -> Tensor")


def _all_reduce(x: Tensor) -> Tensor:
    if _ranks.record is not None:
        _ranks.record.append(CollectiveCall("all_reduce", x.shape[-1]))
    return x.clone(memory_format=torch.contiguous_format) if _ranks.is_alone else _group().all_reduce(x)


def _all_gather(x: Tensor, size: int, num_ranks: int) -> Tensor:
    """Return ``[..., size]`` of the parts ``[..., part]`` that ``shard_range`` gives to the ranks."""
    if _ranks.record is not None:
        _ranks.record.append(CollectiveCall("all_gather", size))
    part = -(-size // num_ranks)
    if x.shape[-1] < part:
        x = torch.nn.functional.pad(x, (0, part - x.shape[-1]))
    parts = x.expand(num_ranks, *x.shape) if _ranks.is_alone else _group().all_gather(x)
    return parts.movedim(0, -2).reshape(*x.shape[:-1], num_ranks * part)[..., :size].contiguous()


for _device in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _device)
    _library.impl("all_gather", _all_gather, _device)


@torch.library.register_fake("omniserve::all_reduce")
def _fake_all_reduce(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("omniserve::all_gather")
def _fake_all_gather(x: Tensor, size: int, num_ranks: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], size))

"""Memory for the host pool: huge pages, spread over the NUMA nodes whose cores read it, page-locked for a GPU."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import omniserve.ops  # noqa: F401 - loads the extension

_HUGE_PAGE_BYTES = 2 << 20


class _Region(mmap.mmap):
    """Anonymous memory. Tensors that view it keep it alive; CUDA unregisters it before it is unmapped."""

    locked_at: int | None = None
    """The address from which on CUDA has page-locked it."""
    process_id: int | None = None
    """Of the process that had it page-locked; CUDA does not work in its forked children."""
    locked_on: int = 0
    """The device that was the current one then."""

    def __del__(self) -> None:
        is_over = sys.is_finalizing()  # a process that ends gives all back
        if self.locked_at is not None and self.process_id == os.getpid() and not is_over:
            with torch.cuda.device(self.locked_on):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.locked_at))


def allocate_pool(
    shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool = False, cores: Iterable[int] | None = None
) -> Tensor:
    """Return an uninitialised CPU tensor for random reads at full speed.

    The memory starts at a huge page, asks for huge pages (with 4 KiB ones a read of the pool runs at 0.85 to 0.9 of the
    speed), and is not backed by any before somebody touches it; page-locked memory is there at once. torch's own
    page-locked memory would be up to twice as much as is asked for: it is rounded up to a power of two.

    Args:
        shape: Of the tensor.
        dtype: Likewise.
        pin_memory: Page-locked memory, for a CUDA device tier.
        cores: Cores of the threads that will read; None: all that this process may use. If they belong to several
            NUMA nodes, pages are spread over these in turn; else they come from wherever they are first touched.

    Raises:
        RuntimeError: The kernel refuses to spread the pages, or CUDA to page-lock them.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    region = _Region(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)  # the tensor keeps the region alive
    memory = memory[-memory.data_ptr() % _HUGE_PAGE_BYTES :][:num_bytes]
    nodes = _numa_nodes(cores if cores is not None else os.sched_getaffinity(0))
    if len(nodes) > 1:
        torch.ops.omniserve_host.interleave(memory, torch.tensor(sorted(nodes)))
    if pin_memory:
        memory.zero_()  # on all cores; page-locking would touch its pages on one
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if error != 0:
            raise RuntimeError(
                f"CUDA cannot page-lock {num_bytes / (1 << 30):.2f} GiB for the host pool (error {error}); "
                "give a smaller host_kv_bytes, or allow more locked memory (ulimit -l)"
            )
        region.locked_at, region.locked_on = memory.data_ptr(), torch.cuda.current_device()
        region.process_id = os.getpid()
    return memory.view(dtype).view(*shape)


def _numa_nodes(cores: Iterable[int]) -> set[int]:
    folders = (folder for core in cores for folder in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*"))
    return {int(folder.name.removeprefix("node")) for folder in folders}

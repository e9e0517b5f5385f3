"""Memory for the host pool: huge pages, spread over the NUMA nodes of the cores that read it, page-locked for a GPU.

The host pool has a layout of its own (``ops/csrc/attention.h``): a block ``[K, 2, S, H]`` is one run of memory, read in
the order in which it lies, each byte once for all query heads of its group; V of bf16 lies in token pairs. Moves repack
at the speed of a copy. An idle-priority thread touches the pool's huge pages ahead of the work.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

import omniserve.ops  # noqa: F401 - loads the extension
from omniserve.core.numa import read_nodes

logger = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20


class _Region(mmap.mmap):
    """Anonymous memory, which tensors that view it keep alive. CUDA unregisters it before it is unmapped."""

    locked_at: int | None = None
    """The address of the page-locked memory."""
    process_id: int | None = None
    """The process that page-locked it; CUDA does not work in its forked children."""
    locked_on: int = 0
    """The device that was current when it was page-locked."""

    def __del__(self) -> None:
        # A process that ends gives all memory back by itself.
        if self.locked_at is not None and self.process_id == os.getpid() and not sys.is_finalizing():
            with torch.cuda.device(self.locked_on):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.locked_at))


def allocate_pool(
    shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool = False, cores: Iterable[int] | None = None
) -> Tensor:
    """Return an uninitialised CPU tensor for random reads at full speed.

    The memory is aligned to huge pages and asks for them: with pages of 4 KiB a read of the pool has 0.85 to 0.9 of the
    speed. Pages exist from their first use on; with `pin_memory`, which page-locks them for a GPU, all exist at once.
    torch's own page-locked memory would be rounded up to a power of two.

    `cores` are those of the threads that will read, by default all that this process may use. If they belong to several
    NUMA nodes, pages are spread over these in turn, unless the kernel refuses that, as it may in a container. Otherwise
    the process's memory policy says where a page is; without one, on the node that first touches it.

    Raises:
        RuntimeError: CUDA refuses to page-lock the memory.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    region = _Region(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)  # the tensor keeps the region alive
    memory = memory[-memory.data_ptr() % _HUGE_PAGE_BYTES :][:num_bytes]
    nodes = read_nodes(set(cores if cores is not None else os.sched_getaffinity(0)))
    if len(nodes) > 1:
        try:
            torch.ops.omniserve_host.interleave(memory, torch.tensor([node.number for node in nodes]))
        except RuntimeError as refusal:
            logger.warning("%s: a page is of the NUMA node of the core that touches it first", refusal)
    if pin_memory:
        memory.zero_()  # on all cores; page-locking would touch the pages on one core
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if error != 0:
            raise RuntimeError(
                f"CUDA cannot page-lock {num_bytes / (1 << 30):.2f} GiB for the host pool (error {error}); "
                "give a smaller host_kv_bytes, or allow more locked memory (ulimit -l)"
            )
        region.locked_at, region.locked_on = memory.data_ptr(), torch.cuda.current_device()
        region.process_id = os.getpid()
    return memory.view(dtype).view(*shape)

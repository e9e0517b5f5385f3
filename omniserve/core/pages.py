"""Huge pages for memory that a CPU reads."""

from __future__ import annotations

import ctypes
import logging
import mmap

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20


def ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Advise the kernel to put memory into 2 MiB pages, before it is written: reads miss fewer of them.

    Only whole pages inside it are asked for; where the kernel does not know the advice, nothing changes.
    """
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + num_bytes - first) // HUGE_PAGE * HUGE_PAGE
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if length <= 0 or advice is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice) != 0:
        logger.info("no huge pages for %d MiB (madvise: errno %d)", length >> 20, ctypes.get_errno())

"""Compile launches for Hopper without a GPU: what Triton's interpreter lets pass may still not compile.

Run as a program, in a process of its own (the interpreter is chosen when Triton is imported), it compiles each kernel
for the shapes of a model and prints a line of JSON for each: its name and the memory accesses of its PTX. A last line
has how many kernels are compiled for what differs between steps, and between moves.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

DTYPE = torch.bfloat16
_ACCESS = re.compile(r"\b(?:(?:ld|st|atom)\.global\S*|bar\.sync)")


def compiled(*launches: Callable[[], Any]) -> Iterator[Any]:
    """Yield the kernels that each call would launch, compiled, in order; nothing runs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Hopper:
        """As much of a driver as a compiler asks for."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compile_only
    try:
        for launch in launches:
            launch()
            yield from kernels
            kernels.clear()
    finally:
        JITFunction.run = run


def launches() -> Iterator[Callable[[], Any]]:
    """Yield a call of each launch function, with the shapes of an 8B model: D 4096, N 32, K 8, H 128."""
    from omniserve.ops.kernels import blocks, rows

    hidden, store = torch.empty(9, 4096, dtype=DTYPE), torch.empty(6, 4096, dtype=DTYPE)
    q, k, v = torch.empty(9, 48, 128, dtype=DTYPE).split([32, 8, 8], 1)
    tokens, seats = torch.zeros(9, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    cache, pool = torch.empty(2, 3, 8, 16, 128, dtype=DTYPE), torch.empty(2, 5, 8, 2, 16, 128, dtype=DTYPE)
    yield lambda: rows.store_kv(k, v, cache[0], cache[1], tokens)
    yield lambda: rows.piggyback_concat(hidden, store, seats)
    yield lambda: rows.residual_store(hidden, store, seats)
    yield lambda: rows.residual_fetch(store, seats, hidden)
    yield lambda: rows.gather_rows(store, seats, store)
    mailbox, flags = torch.empty(6, 48 * 128, dtype=DTYPE), torch.zeros(6, dtype=torch.int64)
    yield lambda: rows.piggyback_send(hidden, q, k, v, seats, store, mailbox, flags, seats[:1])
    for to_host in (True, False):
        for is_reversed in (True, False):
            copy = {"to_host": to_host, "is_reversed": is_reversed}
            yield lambda copy=copy: blocks.copy_blocks(cache, cache, pool, seats, seats, **copy)
    yield lambda: blocks.copy_blocks(cache.half(), cache.half(), pool.half(), seats, seats, **copy)


def steps() -> Iterator[Callable[[], Any]]:
    """Yield launches that differ as steps do: numbers of rows, seats and slots, and where index tensors begin."""
    from omniserve.ops.kernels import rows

    hidden, store = torch.empty(33, 4096, dtype=DTYPE), torch.empty(17, 4096, dtype=DTYPE)
    slots = torch.zeros(20, dtype=torch.int64)
    for num_rows in (4, 9, 16, 33):
        for first, num_slots in ((0, 1), (1, 16), (2, 17)):
            seats = slots[first : first + num_rows // 4]
            yield functools.partial(rows.residual_store, hidden[:num_rows], store[:num_slots], seats)


def moves() -> Iterator[Callable[[], Any]]:
    """Yield launches that differ as moves do: numbers of layers and blocks, and where index tensors begin."""
    from omniserve.ops.kernels import blocks

    for num_layers, num_blocks in ((1, 1), (2, 3), (16, 16), (3, 17)):
        cache = torch.empty(num_layers, num_blocks, 8, 16, 128, dtype=DTYPE)
        pool, ids = torch.empty(num_layers, 5, 8, 2, 16, 128, dtype=DTYPE), torch.zeros(2, num_blocks).long()
        copy = functools.partial(blocks.copy_blocks, cache, cache, pool, to_host=True, is_reversed=False)
        yield functools.partial(copy, ids[0], ids[1])


if __name__ == "__main__":
    for kernel in compiled(*launches()):
        ptx = kernel.asm["ptx"]
        print(json.dumps({"name": kernel.metadata.name, "accesses": _ACCESS.findall(ptx)}))
    print(json.dumps([len({id(kernel) for kernel in compiled(*varied)}) for varied in (steps(), moves())]))

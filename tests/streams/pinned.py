"""Page-locked memory as torch's allocator and ``cudaHostRegister`` give it, and what stands in memory that is free."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_FAR = 0x7F7F7F7F


def poison(raw: Tensor) -> None:
    """Fill a CPU tensor with what no right step reads: NaN, or indices that are out of any range."""
    if raw.is_floating_point():
        raw.fill_(torch.nan)
    elif raw.dtype is torch.bool:
        raw.fill_(True)
    else:
        raw.fill_(_FAR % (1 << (8 * raw.itemsize - 1)))


class PinnedBlock:
    """Page-locked memory from torch's allocator.

    It is handed out again when no tensor refers to it and the copies that torch was asked for are over. Of kernels that
    read or write it torch does not know.

    Args:
        raw: Its bytes.
        dtype: What they will hold.
        give_back: Called when they can be handed out again.
    """

    def __init__(self, raw: Tensor, dtype: torch.dtype, give_back: Callable[[Tensor], object]) -> None:
        self.raw = raw
        self.dtype = dtype
        self.num_copies = 0
        self.is_free = False
        self._give_back = give_back
        self._fill()

    def _fill(self) -> None:
        poison(self.raw[: len(self.raw) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype))

    def begin_copy(self) -> None:
        self.num_copies += 1

    def end_copy(self) -> None:
        self.num_copies -= 1
        self._use_again()

    def let_go(self) -> None:
        self.is_free = True
        self._use_again()

    def _use_again(self) -> None:
        if self.is_free and self.num_copies == 0:
            self._fill()
            self._give_back(self.raw)


class PinnedMemory:
    """The page-locked memory: torch's, and what was registered."""

    def __init__(self) -> None:
        self._blocks: dict[int, PinnedBlock] = {}
        self._registered: dict[int, int] = {}
        self._free_blocks: list[Tensor] = []

    def allocate(self, size: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, in what was given back last if it fits."""
        shape = torch.Size(size)
        num_bytes = shape.numel() * dtype.itemsize
        with torch.inference_mode(False):
            for raw in reversed(self._free_blocks):
                if len(raw) >= num_bytes:
                    self._free_blocks = [other for other in self._free_blocks if other is not raw]
                    break
            else:
                raw = torch.empty(-(-max(num_bytes, 1) // 64) * 64, dtype=torch.uint8)
            block = PinnedBlock(raw, dtype, self._free_blocks.append)
            memory = raw.numpy().view()
            # Not the block's own storage: works that hold the block's must not keep the host's from being freed.
            made = torch.from_numpy(memory)[:num_bytes].view(dtype).view(shape)
        address = made.untyped_storage().data_ptr()
        self._blocks[address] = block
        weakref.finalize(memory, self._free, address).atexit = False
        return made

    def _free(self, address: int) -> None:
        self._blocks.pop(address).let_go()

    def register(self, address: int, num_bytes: int) -> None:
        self._registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self._registered[address]

    def block_of(self, tensor: Tensor) -> PinnedBlock | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def has(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return self.block_of(tensor) is not None or any(
            start <= address < start + size for start, size in self._registered.items()
        )

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same page-locked memory that does not keep the host's from being freed."""
        block = self.block_of(tensor)
        if block is None:
            return tensor
        with torch.inference_mode(False):
            return torch.empty(0, dtype=tensor.dtype).set_(
                block.raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )

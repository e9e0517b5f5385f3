"""Tensors of safetensors files, of which any part can be read: the files' bytes, and which of them a part is."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

Region = tuple[tuple[int, int], ...]
"""The first element of each dimension, and the one behind the last."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_BLOCK_BYTES = 1 << 23
"""The most bytes that are read before they are copied to their place."""
_LEAST_RUN_BYTES = 1 << 16
"""Shorter runs of neighbouring elements are not read one by one, but with what lies between them."""


class NotInParts(Exception):
    """A checkpoint, or what its model does with it, cannot be read in parts; the message says why."""


class CheckpointFiles:
    """The safetensors files of a checkpoint.

    A tensor that is wanted whole and as it is stored is a view of the mapped file, as in any load of transformers.
    Parts are read into memory: through mapped pages the system would read ahead, and take most of the file.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self.read_bytes = 0
        """Bytes that were taken from the files so far; of views the bytes that they show."""

    def open(self, paths: Sequence[str | Path]) -> dict[str, Stored]:
        """Return the tensors of files, by name; nothing but the files' headers is read."""
        tensors: dict[str, Stored] = {}
        for path in map(str, paths):
            descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header = json.loads(os.pread(descriptor, header_bytes, 8))
            file = safe_open(path, framework="pt", device="cpu")
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if entry["dtype"] not in _DTYPES:
                    raise NotInParts(f"{name} has the dtype {entry['dtype']}, of which no part can be read")
                form = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")
                begin = 8 + header_bytes + entry["data_offsets"][0]
                tensors[name] = Stored(form, self, descriptor, begin, file.get_slice(name))
        return tensors

    def fill(self, out: Tensor, descriptor: int, start: int, stored: Tensor, region: Region) -> None:
        """Copy a region of a tensor that begins at a byte of a file; the dtype becomes that of ``out``.

        Args:
            out: A tensor of the region's shape.
            descriptor: The file's.
            start: The byte.
            stored: The tensor's form, on the device ``meta``.
            region: What is wanted of it.
        """
        if not out.numel():
            return
        if not region:
            out.copy_(self._read(descriptor, start, stored[None])[0])
            return
        (begin, end), inner = region[0], region[1:]
        row_bytes = stored[0].numel() * stored.dtype.itemsize
        if _run_length(stored.shape[1:], inner) * stored.dtype.itemsize < min(row_bytes, _LEAST_RUN_BYTES):
            inner_slices = tuple(slice(*each) for each in inner)
        elif any(each != (0, size) for each, size in zip(inner, stored.shape[1:], strict=True)):
            for row in range(begin, end):
                self.fill(out[row - begin], descriptor, start + row * row_bytes, stored[0], inner)
            return
        else:
            inner_slices = (slice(None),) * len(inner)
        os.posix_fadvise(descriptor, start + begin * row_bytes, (end - begin) * row_bytes, os.POSIX_FADV_WILLNEED)
        step = max(1, _BLOCK_BYTES // row_bytes)
        for first in range(begin, end, step):
            last = min(end, first + step)
            rows = self._read(descriptor, start + first * row_bytes, stored[first:last])
            out[first - begin : last - begin].copy_(rows[(slice(None), *inner_slices)])

    def _read(self, descriptor: int, start: int, form: Tensor) -> Tensor:
        """Read a tensor that lies in a file from a byte on; the next call takes its memory."""
        num_bytes = form.numel() * form.dtype.itemsize
        if len(self._block) < num_bytes:
            self._block = torch.empty(num_bytes, dtype=torch.uint8)
        data = self._block[:num_bytes]
        left = data.numpy().data
        while len(left):
            count = os.preadv(descriptor, [left], start)
            if not count:
                raise OSError("a safetensors file ends before its tensors do")
            start, left = start + count, left[count:]
        self.read_bytes += num_bytes
        return data.view(form.dtype).view(form.shape)


def _run_length(shape: Sequence[int], region: Region) -> int:
    """Return how many neighbouring elements of a tensor a region has at least."""
    length = 1
    for size, (begin, end) in zip(reversed(shape), reversed(region), strict=True):
        length *= end - begin
        if (begin, end) != (0, size):
            break
    return length


class Values:
    """Where the elements of an unread tensor come from."""

    has_cast = False
    """A dtype is changed on the way."""

    def __init__(self, form: Tensor) -> None:
        self.form = form
        """A tensor on the device ``meta`` with the same shape, strides and dtype."""

    def fill(self, out: Tensor, region: Region) -> None:
        """Copy the elements of a region into a tensor of its shape, and of this dtype unless nothing casts."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """Return all values, in the layout of the form."""
        out = torch.empty_strided(self.form.shape, dense_strides(self.form), dtype=self.form.dtype)
        self.fill(out, tuple((0, size) for size in self.form.shape))
        return out


class Stored(Values):
    """A tensor of a file, which begins at a byte; ``mapped[...]`` is a view of it."""

    def __init__(self, form: Tensor, files: CheckpointFiles, descriptor: int, start: int, mapped: Any) -> None:
        super().__init__(form)
        self._files, self._descriptor, self._start, self._mapped = files, descriptor, start, mapped

    def fill(self, out: Tensor, region: Region) -> None:
        self._files.fill(out, self._descriptor, self._start, self.form, region)

    def whole(self) -> Tensor:
        view: Tensor = self._mapped[...]
        self._files.read_bytes += view.nbytes
        return view


def dense_strides(form: Tensor) -> tuple[int, ...]:
    """Return the strides that a copy of a tensor has."""
    return torch.empty_like(form).stride()

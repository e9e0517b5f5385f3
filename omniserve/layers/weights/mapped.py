"""Weights that are still in a mapped file when a model has been patched, and how they come into memory of the process.

Prepacked weights are copies, and so are parts of a checkpoint's tensors. What a rank has whole and as it is stored is
a view of the mapped file, whose pages are where they were first read, by whatever process.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import torch
from torch import Tensor, nn

_MAPS = Path("/proc/self/maps")


def copy_mapped_weights(model: nn.Module) -> int:
    """Copy parameters and buffers that are views of mapped files into memory of this process; return their bytes.

    Embeddings stay as they are, unless a head shares their weight: a step looks up a few rows of them.
    """
    begins, ends = _file_mappings()
    copied = 0
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                continue
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and _is_inside(tensor, begins, ends):
                    tensor.data = tensor.data.clone()
                    copied += tensor.nbytes
    return copied


def _file_mappings() -> tuple[list[int], list[int]]:
    """Return the first address of each file that is mapped here, and the one behind its last, in order."""
    begins, ends = [], []
    for line in _MAPS.read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            begin, _, end = addresses.partition("-")
            begins.append(int(begin, 16))
            ends.append(int(end, 16))
    return begins, ends


def _is_inside(tensor: Tensor, begins: list[int], ends: list[int]) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    before = bisect_right(begins, tensor.data_ptr())
    return before > 0 and tensor.data_ptr() < ends[before - 1]

"""The device tier's KV tensors.

Legend: L layers, B blocks, K KV heads, S block size, H head size.

KV of int8 is in tensors ``[L, B, K, S, H + 4]`` of bytes. The ``S * (H + 4)`` of a block's head are its rows of codes,
``[S, H]``, and behind them the scales of these, S numbers of float32. A copy of whole blocks is a
copy of these bytes, whatever they mean.
"""

from __future__ import annotations

import torch

from omniserve.core.pages import ask_for_huge_pages
from omniserve.core.spec import SCALE_BYTES, ModelSpec
from omniserve.core.work import SlotCopy


class DeviceKVStorage:
    """K and V on the device, head-major blocks (``[B, K, S, H]`` per layer); one tensor is both if values are keys.

    Of all layers, or of ``layers``, for a rank that has these alone. In ``dtype``, or with ``kv_dtype`` ``int8`` in
    int8 with scales.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: range | None = None,
        kv_dtype: str = "auto",
    ) -> None:
        layers = range(spec.num_layers) if layers is None else layers
        row_size = spec.head_size
        if kv_dtype == "int8":
            dtype, row_size = torch.int8, spec.head_size + SCALE_BYTES
        shape = (len(layers), num_blocks, spec.num_kv_heads, block_size, row_size)
        self.block_size = block_size
        self.k_LBKSH = torch.empty(shape, dtype=dtype, device=device)
        self.v_LBKSH = self.k_LBKSH if spec.value_is_key else torch.empty(shape, dtype=dtype, device=device)
        for pool in {self.k_LBKSH, self.v_LBKSH}:
            if device.type == "cpu":
                ask_for_huge_pages(pool.data_ptr(), pool.nbytes)
            # A block is not read past what was written (tests poison it), but by device attention "flex", which
            # multiplies the rest by 0. On the CPU this also touches the memory: later, a block's first pages would take
            # a step 0.1 s.
            pool.zero_()
        # Indexing a layer costs microseconds, so the views are made once.
        self.k_layers = dict(zip(layers, self.k_LBKSH.unbind(0), strict=True))
        """K of each layer, by the layer's number in the model."""
        self.v_layers = dict(zip(layers, self.v_LBKSH.unbind(0), strict=True))

    def copy_slots(self, copy: SlotCopy) -> None:
        """Copy slots of one block into another."""
        slots = slice(copy.begin, copy.end)
        for pool in (self.k_LBKSH, self.v_LBKSH):
            for part in parts_of_rows(pool):
                part[:, copy.target_block, :, slots] = part[:, copy.source_block, :, slots]


def parts_of_rows(pool_LBKSH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views ``[L, B, K, S, ...]`` of what a pool has of each row: the row, or its codes and its scale."""
    if pool_LBKSH.dtype != torch.int8:
        return (pool_LBKSH,)
    block_size, head_size = pool_LBKSH.shape[3], pool_LBKSH.shape[4] - SCALE_BYTES
    bytes_LBKX = pool_LBKSH.flatten(3)
    codes_LBKX, scales_LBKX = bytes_LBKX.split([block_size * head_size, block_size * SCALE_BYTES], dim=3)
    return codes_LBKX.unflatten(3, (block_size, head_size)), scales_LBKX.view(torch.float32)

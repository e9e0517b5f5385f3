"""The device tier's KV tensors.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

import torch

from omniserve.core.pages import ask_for_huge_pages
from omniserve.core.spec import ModelSpec
from omniserve.core.work import SlotCopy


class DeviceKVStorage:
    """K and V on the device, head-major blocks (``[B, K, S, H]`` per layer).

    Of all layers, or of ``layers``, for a rank that has these alone.
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
    ) -> None:
        layers = range(spec.num_layers) if layers is None else layers
        shape = (len(layers), num_blocks, spec.num_kv_heads, block_size, spec.head_size)
        self.block_size = block_size
        self.k_LBKSH = torch.empty(shape, dtype=dtype, device=device)
        self.v_LBKSH = torch.empty(shape, dtype=dtype, device=device)
        for pool in (self.k_LBKSH, self.v_LBKSH):
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
            pool[:, copy.target_block, :, slots] = pool[:, copy.source_block, :, slots]

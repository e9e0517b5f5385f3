"""The device tier's KV tensors.

Legend: L layers, B blocks, K KV heads, S block size, H head size.
"""

from __future__ import annotations

import torch

from omniserve.spec import ModelSpec


class DeviceKVStorage:
    """K and V of all layers on the device, head-major blocks (``[B, K, S, H]`` per layer).

    Args:
        spec: The model's sizes.
        num_blocks: B.
        block_size: S.
    """

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # empty, not zeros: a block is never read past what was written (tests poison it), and a page of CPU memory
        # that is never touched costs nothing.
        self.k_LBKSH = torch.empty(shape, dtype=dtype, device=device)
        self.v_LBKSH = torch.empty(shape, dtype=dtype, device=device)
        # Indexing a layer costs microseconds, so the views are made once.
        self.k_layers = tuple(self.k_LBKSH.unbind(0))
        self.v_layers = tuple(self.v_LBKSH.unbind(0))

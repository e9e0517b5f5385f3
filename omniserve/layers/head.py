"""``head_product``: the product with the modelling head, for the few rows that need logits.

Tensor legend: R rows that need logits, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve

MAX_SKINNY_ROWS = 32
"""With more rows arithmetic is the limit: at 64 rows the gain in bf16 was a factor of 1.1."""

HAS_VECTOR_KERNEL = torch.backends.cpu.get_cpu_capability().startswith("AVX")
"""The portable kernel, for other CPUs, is slower than torch."""


def head_product(head: nn.Module, hidden_RD: Tensor) -> Tensor:
    """Return ``head(hidden_RD)``, ``[R, V]``, by ``skinny_linear`` if that is faster for this head and these rows.

    A head is the largest weight of a small model. If it is tied to the embedding it cannot be prepacked, because the
    embedding needs dense rows, and no weight is held twice. torch's ``F.linear`` is slow for it: in bf16 it reorders
    the whole weight at every call, in fp32 it is far from the memory's bandwidth. ``skinny_linear`` reads the weight in
    place, once for all rows (docs/performance.md has its times).
    """
    if hidden_RD.shape[0] <= MAX_SKINNY_ROWS and _is_plain(head, hidden_RD.dtype):
        return torch.ops.omniserve.skinny_linear(hidden_RD, head.weight)
    return head(hidden_RD)


def _is_plain(head: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a call of the head is a product with a dense weight on the CPU, and nothing else."""
    return (
        HAS_VECTOR_KERNEL
        and type(head) is nn.Linear  # not packed, quantised or adapted
        and "forward" not in head.__dict__
        and not (head._forward_hooks or head._forward_pre_hooks)
        and head.bias is None
        and type(head.weight) is nn.Parameter
        and head.weight.device.type == "cpu"
        and head.weight.dtype is dtype
        and dtype in (torch.bfloat16, torch.float32)
        and head.weight.is_contiguous()
        and not torch.is_grad_enabled()  # the operator has no backward
    )

"""The language modelling head on the CPU, for the few rows that need logits.

A head is the largest weight of a small model. If it is tied to the embedding it cannot be prepacked, because the
embedding needs dense rows, and no weight is held twice. torch's ``F.linear`` is slow for it: in bf16 it reorders the
whole weight at every call, in fp32 it is far from the memory's bandwidth. ``skinny_linear`` reads the weight in place,
once for all rows. Milliseconds for 49152 x 576 (57 MB in bf16), weight not in any cache, on 2 cores of a Zen 4 EPYC
with avx512_bf16, interleaved medians of one run by hand, of which no record was kept; a plain read of the bf16 weight
took 1.7 to 2.3:

    rows                              1      2      4      8     16     32
    bf16  F.linear                 3.38   3.36   3.69   4.26   5.37   7.28
          F.linear, prepacked      2.38   2.61   2.04   2.46   3.22   5.27
          skinny_linear            1.83   1.86   1.90   1.88   2.72   5.83
          F.linear / skinny_linear 1.8    1.8    1.9    2.3    2.0    1.25
    fp32  F.linear                 9.82  22.1   16.4   15.8   19.0   23.0
          skinny_linear            3.66   3.63   3.87   4.64   6.99  10.6
          F.linear / skinny_linear 2.7    6.1    4.2    3.4    2.7    2.2

The machine is shared: while a plain read took 1.1 to 1.3, bf16 ratios were 3.2, 3.0, 3.3, 3.2 and 2.3 up to 16 rows.
In bf16 at 1 to 16 rows it also won with AVX2 and with plain AVX-512, oneDNN held to the same instructions.

Tensor legend: R rows that need logits, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve

MAX_ROWS = 32
"""With more rows arithmetic is the limit: at 64 rows the gain in bf16 was a factor of 1.1."""

HAS_VECTOR_KERNEL = torch.backends.cpu.get_cpu_capability().startswith("AVX")
"""The portable kernel, for other CPUs, is slower than torch."""


def project(head: nn.Module, hidden_RD: Tensor) -> Tensor:
    """Return ``head(hidden_RD)``, ``[R, V]``, by ``skinny_linear`` if that is faster for this head and these rows."""
    if hidden_RD.shape[0] <= MAX_ROWS and _is_plain(head, hidden_RD.dtype):
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

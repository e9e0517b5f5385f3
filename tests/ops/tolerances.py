"""The tolerances between an operator and its reference, and their reasons."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Tolerances with the meaning of torch.testing.assert_close."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)
"""Rows are moved, not computed."""

ATTENTION = {
    # Sums of up to some 400 fp32 products, each with a rounding error of 6e-8, times scores and values of about 4;
    # soft-capped scores carry another 5e-7. Ten times what was seen.
    torch.float32: Tolerance(2e-6, 2e-5),
    # Inside it is fp32: what differs is one rounding of the result to 8 bits, which may go the other way.
    torch.bfloat16: Tolerance(2**-7, 1e-5),
    # The same with 11 bits.
    torch.float16: Tolerance(2**-10, 1e-5),
}

LINEAR = {
    # Sums of up to 2000 products, results of about 1, each addition with an error of 6e-8. Ten times what was seen.
    torch.float32: Tolerance(2e-6, 1e-5),
    # Inside it is fp32: what differs is one rounding of the result to 8 bits, which may go the other way.
    torch.bfloat16: Tolerance(2**-7, 1e-5),
    # The same with 11 bits.
    torch.float16: Tolerance(2**-10, 1e-5),
}

QUANTIZED_LINEAR = {
    # The same products and sums as of a dense weight.
    torch.float32: LINEAR[torch.float32],
    # Two instruction sets round the weight to 8 bits beside more than 4 rows: of results of about 1 that moves most by
    # 2e-3, and the worst of 20,000 by 1e-2. Twice what was seen; test_quantized_linear.py compares bits.
    torch.bfloat16: Tolerance(2**-7, 2e-2),
    # The weight is not rounded.
    torch.float16: LINEAR[torch.float16],
}

LORA = {
    torch.float32: LINEAR[torch.float32],
    # A value between the products and the second product are rounded, either of which may go the other way.
    torch.bfloat16: Tolerance(2**-6, 2e-2),
    torch.float16: Tolerance(2**-9, 3e-3),
}

TORCH_HALF_ATTENTION = {
    # torch's own attention, which rounds weights (and unfused products) to half precision on the way.
    torch.float32: Tolerance(2e-6, 2e-5),
    torch.bfloat16: Tolerance(2**-6, 3e-2),
    torch.float16: Tolerance(2**-9, 4e-3),
}


# To the bit, but for results in bf16 that are subnormal and flushed to zero.
INT8_LINEAR = {torch.float32: Tolerance(0, 0), torch.bfloat16: Tolerance(0, 1e-37), torch.float16: Tolerance(0, 0)}


def tolerance(op: str, dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of an operator's results."""
    if op in ("packed_linear", "packed_heads"):
        return LINEAR[dtype]
    if op == "add_lora":
        return LORA[dtype]
    if op == "int8_linear":
        return INT8_LINEAR[dtype]
    if op == "quantized_linear":
        return QUANTIZED_LINEAR[dtype]
    return ATTENTION[dtype] if op.endswith("_attention") else EXACT

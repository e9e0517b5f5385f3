"""The instruction sets of this CPU, independent of the one that OMNISERVE_ISA makes the kernels use."""

from __future__ import annotations

import platform
from typing import NamedTuple

import torch

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve_isa


class InstructionSet(NamedTuple):
    """An instruction set for which the extension has kernels."""

    name: str
    """The value of OMNISERVE_ISA."""
    linear: str
    """The set whose linear kernels it selects: the same or a lesser one."""
    supported: bool
    """This CPU has it, and the operating system lets this process use it."""


def instruction_sets() -> list[InstructionSet]:
    """Return the sets, best first."""
    names, linears, supported = torch.ops.omniserve_isa.table()
    return [InstructionSet(*row) for row in zip(names, linears, map(bool, supported), strict=True)]


def has_products(dtype: torch.dtype) -> bool:
    """Tell whether this CPU multiplies matrices of a dtype without converting them.

    bfloat16 needs AVX512-BF16 or AMX on x86, float16 needs AVX512-FP16 or AMX; float32 works on every CPU.
    """
    if dtype is torch.bfloat16:
        if platform.machine() in ("x86_64", "AMD64"):  # torch says yes for any AVX-512, which only emulates them
            return any(each.supported and each.name in ("amx_bf16", "avx512_bf16") for each in instruction_sets())
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is not torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

"""The instruction sets of this CPU, and the one that the kernels use, which OMNISERVE_ISA may force."""

from __future__ import annotations

import os
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
    """The CPU has the instruction set, and the operating system lets this process use it."""


def instruction_sets() -> list[InstructionSet]:
    """Return the sets, best first."""
    names, linears, supported = torch.ops.omniserve_isa.table()
    return [InstructionSet(*row) for row in zip(names, linears, map(bool, supported), strict=True)]


def instruction_set_in_use() -> str:
    """Return the name of the set whose kernels run: the best supported one, or what OMNISERVE_ISA says."""
    return os.environ.get("OMNISERVE_ISA") or next(each.name for each in instruction_sets() if each.supported)

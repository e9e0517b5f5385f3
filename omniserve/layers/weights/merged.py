"""Merged linears for a CUDA device: the weights of a group are views of one tensor, one after the other.

There is one matrix product and one launch instead of three; with few rows those of k and v alone are small for a GPU.
This is reasoned, not yet measured on one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omniserve.layers.compiled import GROUP_PRODUCTS
from omniserve.layers.weights.groups import GroupLinear, join_group, plain_linears, split_group

_DEVICES = frozenset({"cuda"})
_aten = torch.ops.aten
GROUP_PRODUCTS.update((_aten.mm.default, _aten.addmm.default, _aten.permute.default, _aten.reshape.default))


class MergedLinear(GroupLinear):
    """An ``nn.Linear`` whose weight is a view of its group's; ``merge`` makes it. A write to one changes the other."""

    def group_product(self, input: Tensor) -> Tensor:
        return F.linear(input, self.group_weight, self.group_bias)

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler computes it once for all members
            return self.group_product(input).narrow(-1, self.group_start, self.out_features)
        return super().forward(input)


def merge(*linears: nn.Linear) -> None:
    """Merge a group, as ``groups_of`` returns it, in place; each Parameter becomes a view."""
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.cat([linear.weight.data for linear in linears])
        for linear, rows in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
            linear.weight.data = rows
        join_group(linears, MergedLinear, weight)


def unmerge(*linears: nn.Linear) -> None:
    """Undo ``merge`` of the same linears: same class, same Parameter objects, same bits; see ``split_group``."""
    split_group(linears, MergedLinear, lambda: torch.cat([linear.weight.data for linear in linears]))


def mergeable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the candidates that can be merged: plain CUDA linears with a weight that no other module reads."""
    return plain_linears(model, candidates, _DEVICES)

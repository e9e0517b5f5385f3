"""Merged linears for a CUDA device: the weights of a group one after the other in one tensor, of which each is a view.

One matrix product instead of three, and one launch: those of k and v alone are small for a GPU where rows are few.
Reasoned, not yet measured on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omniserve.layers.groups import GroupLinear, is_plain, join, part

_DEVICES = frozenset({"cuda"})


class MergedLinear(GroupLinear):
    """An ``nn.Linear`` whose weight is some rows of its group's. Only ``merge`` and ``unmerge`` make and unmake one.

    It works as before, and what is written into its weight is written into the group's.
    """

    def group_product(self, input: Tensor) -> Tensor:
        return F.linear(input, self.group_weight, self.group_bias)


def merge(*linears: nn.Linear) -> None:
    """Merge a group, as ``groups_of`` returns it, in place; each Parameter becomes a view."""
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.cat([linear.weight.data for linear in linears])
        for linear, rows in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
            linear.weight.data = rows
        join(linears, MergedLinear, weight)


def unmerge(*linears: nn.Linear) -> None:
    """Undo ``merge`` of the same linears: same class, same Parameter objects, same bits.

    Raises:
        ValueError: They are not all the members of one group, in order.
    """
    with torch.inference_mode(False), torch.no_grad():
        part(linears, torch.cat([linear.weight.data for linear in linears]))


def mergeable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return those candidates that can be merged: plain CUDA linears with a weight that no other module reads."""
    uses = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        module
        for module in candidates
        if is_plain(module) and module.weight.device.type in _DEVICES and uses[module.weight.data_ptr()] == 1
    ]

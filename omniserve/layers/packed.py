"""Prepacked linears for the CPU device tier: oneDNN's blocked weight replaces the dense one.

A bf16 ``F.linear`` on the CPU reorders its weight at every call, which packing does once. The
packed tensor is opaque, so a compiled graph cannot take it as an input. It takes an int64 handle tensor instead, by
which an operator finds the packed tensor in a table. Packing a group (``groups.py``) saves the fixed cost of a call,
which is most of the time of a small product.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from omniserve.layers.compiled import GROUP_PRODUCTS
from omniserve.layers.groups import HeldLinear, hide, join, part, plain_linears

_TABLE: dict[int, Tensor] = {}
_next_handle = itertools.count()

_library = torch.library.Library("omniserve", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor handle, Tensor? bias, SymInt out_features) -> Tensor")


def _packed_linear_cpu(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, _TABLE[int(handle)], bias, "none", [], "")


def _packed_linear_fake(x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_library.impl("packed_linear", _packed_linear_cpu, "CPU")
torch.library.register_fake("omniserve::packed_linear", _packed_linear_fake, lib=_library)
GROUP_PRODUCTS.add(torch.ops.omniserve.packed_linear.default)


class _Owner:
    """Held by the members of a group only: when it is freed, so is the group's entry in the table."""


class PackedLinear(HeldLinear):
    """An ``nn.Linear`` with a packed weight; ``pack`` makes it. Its ``group_weight`` is an int64 handle."""

    packed_owner: _Owner
    """Keeps the group's entry in the table."""

    def held_product(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return torch.ops.omniserve.packed_linear, (self.group_weight, self.group_bias, self.group_rows)

    def dense_group(self) -> Tensor:
        return _TABLE[int(self.group_weight)].to_dense()


def pack(*linears: nn.Linear) -> None:
    """Pack a linear, or a group as ``groups_of`` returns it, in place, and free the dense weights."""
    weights = [linear.weight for linear in linears]
    with torch.inference_mode(False), torch.no_grad():
        handle = next(_next_handle)
        dense = torch.cat([weight.data for weight in weights]) if len(weights) > 1 else weights[0].data
        _TABLE[handle] = torch.ops.mkldnn._reorder_linear_weight(dense, None)
        owner = _Owner()
        # A model that is freed while it is patched must not leave its weights in the table.
        weakref.finalize(owner, _TABLE.pop, handle, None).atexit = False
        for linear, weight in zip(linears, weights, strict=True):
            linear.__dict__["packed_owner"] = owner
            hide(weight)
        join(linears, PackedLinear, torch.tensor(handle))


def unpack(*linears: nn.Linear) -> None:
    """Undo ``pack`` of the same linears: same class, same Parameter objects, same bits; see ``part``."""
    part(linears, PackedLinear, lambda: _TABLE.pop(int(cast(PackedLinear, linears[0]).group_weight)).to_dense())
    for linear in linears:
        del linear.__dict__["packed_owner"]


def packable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the candidates for which packing is better: plain bf16 CPU linears with a weight of their own.

    fp32 linears are not (slower with one row; see ``narrow.py``), nor are subclasses (quantised, adapters) or tied
    weights, because an embedding needs dense rows (``layers/head.py`` serves such a head).
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    return plain_linears(model, candidates, ("cpu",), torch.bfloat16)

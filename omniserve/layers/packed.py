"""Prepacked linears for the CPU device tier: oneDNN's blocked weight instead of the dense one, not beside it.

A bf16 ``F.linear`` on the CPU reorders its weight at every call; packing once removes that. ``benchmarks/dense.py``
measures it. The packed tensor is opaque, so a compiled graph cannot take it as an input: an op looks it up in a table
by an int64 handle tensor, which can be one.

Linears that read the same input may be packed as a group (``groups.py``): the fixed cost of a call is most of a small
product.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from omniserve.layers.groups import HeldLinear, hide, is_group, is_plain, join, part

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


class _Owner:
    """Held by the members of a group and by nothing else: its end is the end of their entry in the table."""


class PackedLinear(HeldLinear):
    """An ``nn.Linear`` whose weight is packed, alone or in a group. Only ``pack`` and ``unpack`` make and unmake one.

    Its ``group_weight`` is an int64 handle.

    Attributes:
        packed_owner: Keeps the group's entry in the table.
    """

    packed_owner: _Owner

    def held_product(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return torch.ops.omniserve.packed_linear, (self.group_weight, self.group_bias, self.group_rows)

    def dense_group(self) -> Tensor:
        return _TABLE[int(self.group_weight)].to_dense()


def pack(*linears: nn.Linear) -> None:
    """Pack a linear, or a group as ``groups_of`` returns it, in place and release the dense weights."""
    weights = [linear.weight for linear in linears]
    with torch.inference_mode(False), torch.no_grad():
        handle = next(_next_handle)
        dense = torch.cat([weight.data for weight in weights]) if len(weights) > 1 else weights[0].data
        _TABLE[handle] = torch.ops.mkldnn._reorder_linear_weight(dense, None)
        owner = _Owner()
        # A model that is dropped while patched must not leave its weights behind in the table.
        weakref.finalize(owner, _TABLE.pop, handle, None).atexit = False
        for linear, weight in zip(linears, weights, strict=True):
            linear.__dict__["packed_owner"] = owner
            hide(weight)
        join(linears, PackedLinear, torch.tensor(handle))


def unpack(*linears: nn.Linear) -> None:
    """Undo ``pack`` of the same linears: same class, same Parameter objects, same bits.

    Raises:
        ValueError: They are not all the members of one group, in order.
    """
    if not (isinstance(linears[0], PackedLinear) and is_group(linears)):
        raise ValueError("unpack takes the linears of one call of pack, in the same order")
    with torch.inference_mode(False), torch.no_grad():
        dense = _TABLE.pop(int(linears[0].group_weight)).to_dense()
        for linear in linears:
            del linear.__dict__["packed_owner"]
        part(linears, dense)


def packable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return those candidates that packing serves: plain bf16 CPU linears with a weight that no other module reads.

    fp32 is left alone (slower with one row; see ``narrow.py``), and so are subclasses (quantised, adapters) and tied
    weights: an embedding needs its rows dense (``layers/head.py`` serves that head).
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    uses = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        module
        for module in candidates
        if is_plain(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype is torch.bfloat16
        and uses[module.weight.data_ptr()] == 1
    ]

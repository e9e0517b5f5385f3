"""Prepacked linears for the CPU device tier: oneDNN's blocked weight instead of the dense one, not beside it.

A bf16 ``F.linear`` on the CPU reorders its weight at every call; packing once removes that. ``benchmarks/dense.py``
measures it. The packed tensor is opaque, so a compiled graph cannot take it as an input: an op looks it up in a table
by an int64 handle tensor, which can be one.

Linears that read the same input may be packed as a group, their rows one after the other in one weight: ``project``
then computes all of them in one call, whose fixed cost is most of a small product.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

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


class _PackedProduct(torch.autograd.Function):
    """Forward only: a packed weight has no gradient, and saying so beats returning none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        return torch.ops.omniserve.packed_linear(x, handle, bias, out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError("prepacked linears have no backward; omniserve.unpatch(model), or patch with prepack=False")


class _Owner:
    """Held by the members of a group and by nothing else: its end is the end of their entry in the table."""


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` whose weight is packed, alone or in a group. Only ``pack`` and ``unpack`` make and unmake one.

    They change the module's class and leave the object, its Parameter objects, hooks and names alone. While packed the
    Parameter keeps shape and dtype but holds NaN without storage behind it, so that reading it cannot go unnoticed;
    ``weight`` and ``state_dict()`` give the dense values. Calling a member of a group computes the whole group and
    throws the rest away; the halves call ``project`` instead.

    Attributes:
        packed_handle: int64 scalar, the same object for all members of a group.
        packed_owner: Keeps the group's entry in the table.
        packed_bias: Bias of the group; the members' biases are views of it.
        packed_start: The member's first row in the packed weight.
        packed_rows: Rows of the packed weight.
    """

    packed_handle: Tensor
    packed_owner: _Owner
    packed_bias: Tensor | None
    packed_start: int
    packed_rows: int

    def forward(self, input: Tensor) -> Tensor:
        product = self.group_product(input)
        if self.packed_rows == self.out_features:
            return product
        return product.narrow(-1, self.packed_start, self.out_features).contiguous()

    def group_product(self, input: Tensor) -> Tensor:
        """Return the products of all members, one after the other in the last dimension."""
        arguments = (input, self.packed_handle, self.packed_bias, self.packed_rows)
        if torch.is_grad_enabled():
            return _PackedProduct.apply(*arguments)
        return torch.ops.omniserve.packed_linear(*arguments)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dense copy of the weight, bit for bit the original."""
        # Never an inference tensor: the copy may become a Parameter's data again.
        with torch.inference_mode(False), torch.no_grad():
            dense = _TABLE[int(self.packed_handle)].to_dense()
            if self.packed_rows == self.out_features:
                return dense
            # A clone: a view would keep the other members' rows alive.
            return dense.narrow(0, self.packed_start, self.out_features).clone()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            self._refuse(f"be given another {name}")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("be copied")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        self._refuse("change its device or dtype")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("load a state dict")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            # A clone: savers refuse tensors that share their storage.
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach().clone()

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"a prepacked linear cannot {what}; call omniserve.unpatch(model) first")


def pack(*linears: nn.Linear) -> None:
    """Pack a linear, or a group as ``groups_of`` returns it, in place and release the dense weights."""
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    with torch.inference_mode(False), torch.no_grad():
        handle = next(_next_handle)
        dense = torch.cat([weight.data for weight in weights]) if len(weights) > 1 else weights[0].data
        _TABLE[handle] = torch.ops.mkldnn._reorder_linear_weight(dense, None)
        owner = _Owner()
        # A model that is dropped while patched must not leave its weights behind in the table.
        weakref.finalize(owner, _TABLE.pop, handle, None).atexit = False
        group_bias = torch.cat([bias.data for bias in biases]) if biases else None
        shared = {
            "packed_handle": torch.tensor(handle),
            "packed_owner": owner,
            "packed_bias": group_bias,
            "packed_rows": sum(linear.out_features for linear in linears),
        }
        start = 0
        for linear, weight in zip(linears, weights, strict=True):
            linear.__dict__.update(shared, packed_start=start)
            weight.data = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)
            if group_bias is not None:
                linear.bias.data = group_bias.narrow(0, start, linear.out_features)
            start += linear.out_features
            linear.__class__ = PackedLinear


def unpack(*linears: nn.Linear) -> None:
    """Undo ``pack`` of the same linears: same class, same Parameter objects, same bits.

    Raises:
        ValueError: They are not all the members of one group, in order.
    """
    if not _are_group(linears):
        raise ValueError("unpack takes the linears of one call of pack, in the same order")
    with torch.inference_mode(False), torch.no_grad():
        dense = _TABLE.pop(int(cast(PackedLinear, linears[0]).packed_handle)).to_dense()
        parts = dense.split([linear.out_features for linear in linears])
        for linear, part in zip(linears, parts, strict=True):
            linear.__class__ = nn.Linear
            for name in PackedLinear.__annotations__:
                delattr(linear, name)
            # Each Parameter owns its storage again.
            linear.weight.data = part.clone() if len(linears) > 1 else dense
            if linear.bias is not None:
                linear.bias.data = linear.bias.data.clone()


def _are_group(linears: Sequence[Any]) -> bool:
    """Tell whether these are all the members of one group, in order."""
    first, rows = linears[0], 0
    for linear in linears:
        if type(linear) is not PackedLinear or linear.packed_handle is not first.packed_handle:
            return False
        if linear.packed_start != rows:
            return False
        rows += linear.out_features
    return rows == first.packed_rows


def fused(*linears: nn.Module) -> bool:
    """Tell whether ``project`` computes these in one call: one group, and nobody wants to see a member called."""
    return _are_group(linears) and not any(_is_watched(linear) for linear in linears)


def project(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Return ``linear(x)`` for each; views of one product where the linears were packed as a group."""
    if not fused(*linears):
        return tuple(linear(x) for linear in linears)
    members = cast(tuple[PackedLinear, ...], linears)
    return members[0].group_product(x).split([member.out_features for member in members], dim=-1)


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__


def packable(model: nn.Module, candidates: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return those candidates that packing serves: plain bf16 CPU linears whose weight nobody else reads.

    fp32 is left alone (slower with one row), and so are subclasses (quantised, adapters) and tied weights: an embedding
    needs its rows dense (``layers/head.py`` serves that head).
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    uses = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        module
        for module in candidates
        if type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module._parameters.get("weight")) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype is torch.bfloat16
        and module.weight.is_contiguous()
        and uses[module.weight.data_ptr()] == 1
    ]


def groups_of(linears: Sequence[nn.Linear], groups: Iterable[Sequence[nn.Module]]) -> list[tuple[nn.Linear, ...]]:
    """Sort packable linears into what ``pack`` takes: those of ``groups`` that can be fused, and the others singly.

    Args:
        linears: From ``packable``.
        groups: Disjoint sets of modules that are given the same input.
    """
    left = {id(linear): linear for linear in linears}
    sorted_groups: list[tuple[nn.Linear, ...]] = []
    for group in groups:
        members = [left[id(module)] for module in group if id(module) in left]
        if (
            len(members) == len(group) > 1
            and len({(member.in_features, member.bias is None) for member in members}) == 1
            and not any(_is_watched(member) for member in members)
        ):
            sorted_groups.append(tuple(members))
            for member in members:
                del left[id(member)]
    return sorted_groups + [(linear,) for linear in left.values()]
